-- How long a lease of each worker lasts (null: not known), and its process (boot, namespace, number, start), by which
-- another process in the same place sees that it has ended. A lost session proves no death: `lock` is used no more.
ALTER TABLE keepstep_worker ADD COLUMN lease_seconds double precision;
ALTER TABLE keepstep_worker ADD COLUMN process text NOT NULL DEFAULT '';
-- Free runs by the time at which they are due, whatever their priority. The cast keeps this index and `keepstep_head_due`
-- apart: a statement that asks for `worker IS NULL` cannot use this one, and one that repeats the cast only this one.
CREATE INDEX keepstep_head_time ON keepstep_head (workflow, due_at, priority, run, version)
    WHERE (worker IS NULL)::int = 1 AND due_at IS NOT NULL;
