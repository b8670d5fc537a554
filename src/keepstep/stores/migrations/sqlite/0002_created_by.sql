-- Who started a run: a person and a process, or another run.
ALTER TABLE keepstep_run ADD COLUMN created_by TEXT NOT NULL DEFAULT '';
