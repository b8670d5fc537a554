-- The head repeats the key of its run beside the queue, so that runs can be counted and ordered by both.
ALTER TABLE keepstep_head ADD COLUMN key TEXT;
UPDATE keepstep_head SET key = (SELECT key FROM keepstep_run WHERE id = keepstep_head.run)
    WHERE run IN (SELECT id FROM keepstep_run WHERE key IS NOT NULL);
-- A claim reads one workflow and queue after the other: free runs by priority and by time, and those of each worker.
DROP INDEX keepstep_head_due;
DROP INDEX keepstep_head_time;
DROP INDEX keepstep_head_owner;
CREATE INDEX keepstep_head_due ON keepstep_head (workflow, queue, priority, due_at, run, version)
    WHERE worker IS NULL AND due_at IS NOT NULL;
CREATE INDEX keepstep_head_time ON keepstep_head (workflow, queue, due_at, priority, run, version)
    WHERE worker IS NULL AND due_at IS NOT NULL;
CREATE INDEX keepstep_head_owner ON keepstep_head (worker, workflow, queue, run, version) WHERE worker IS NOT NULL;
