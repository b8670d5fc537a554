-- How long a lease of each worker lasts: others judge it by its own lease, and not by theirs. Null: not known.
ALTER TABLE keepstep_worker ADD COLUMN lease_seconds REAL;
