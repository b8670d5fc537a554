-- The key that a run's values are encrypted with, itself encrypted; and what holds a signal to what was written.
ALTER TABLE keepstep_run ADD COLUMN data_key TEXT NOT NULL DEFAULT '';
ALTER TABLE keepstep_signal ADD COLUMN checksum TEXT NOT NULL DEFAULT '';
