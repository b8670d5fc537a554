-- The head repeats the queue and the key of its run, so that runs can be claimed, counted and ordered by both. A step
-- names neither when it finds its head by way of an INSERT: it needs the default.
ALTER TABLE keepstep_head ADD COLUMN queue text COLLATE "C" NOT NULL DEFAULT 'default';
ALTER TABLE keepstep_head ADD COLUMN key text COLLATE "C";
UPDATE keepstep_head h SET queue = r.queue, key = r.key FROM keepstep_run r
    WHERE r.id = h.run AND (r.queue <> 'default' OR r.key IS NOT NULL);
-- A claim reads one workflow and queue after the other: free runs by priority and by time, and those of each worker.
DROP INDEX keepstep_head_due;
DROP INDEX keepstep_head_time;
DROP INDEX keepstep_head_owner;
CREATE INDEX keepstep_head_due ON keepstep_head (workflow, queue, priority, due_at, run, version)
    WHERE worker IS NULL AND due_at IS NOT NULL;
CREATE INDEX keepstep_head_time ON keepstep_head (workflow, queue, due_at, priority, run, version)
    WHERE (worker IS NULL)::int = 1 AND due_at IS NOT NULL;
CREATE INDEX keepstep_head_owner ON keepstep_head (worker, workflow, queue, run, version) WHERE worker IS NOT NULL;
-- Heads that a repair has put aside, if there are any, keep the columns of a head.
ALTER TABLE IF EXISTS keepstep_aside_head ADD COLUMN queue text COLLATE "C" NOT NULL DEFAULT 'default';
ALTER TABLE IF EXISTS keepstep_aside_head ADD COLUMN key text COLLATE "C";
