-- How long a lease of each worker lasts (null: not known), and its process (boot, namespace, number, start), by which
-- another process in the same place sees that it has ended. A lost session proves no death: `lock` is used no more.
ALTER TABLE keepstep_worker ADD COLUMN lease_seconds double precision;
ALTER TABLE keepstep_worker ADD COLUMN process text NOT NULL DEFAULT '';
