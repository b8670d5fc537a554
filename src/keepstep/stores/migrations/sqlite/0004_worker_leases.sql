-- How long a lease of each worker lasts: others judge it by its own lease, and not by theirs. Null: not known.
ALTER TABLE keepstep_worker ADD COLUMN lease_seconds REAL;
-- Free runs by the time at which they are due, whatever their priority.
CREATE INDEX keepstep_head_time ON keepstep_head (workflow, due_at, priority, run, version)
    WHERE worker IS NULL AND due_at IS NOT NULL;
