-- A start with `dedupe` is unique in its queue among runs that have not finished.
ALTER TABLE keepstep_run ADD COLUMN dedupe TEXT;
ALTER TABLE keepstep_head ADD COLUMN dedupe TEXT;
-- Whether a run has begun and not ended, and so holds its key (1) or shares that of its parent (2). `gate` is where a
-- free run waits, or whose place a leased one holds; `since` is the time from which it waits there.
ALTER TABLE keepstep_head ADD COLUMN holds INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keepstep_head ADD COLUMN gate TEXT;
ALTER TABLE keepstep_head ADD COLUMN since REAL;
UPDATE keepstep_head SET holds = 1 WHERE key IS NOT NULL AND epoch > 0
    AND status NOT IN ('completed', 'failed', 'cancelled', 'set aside');
-- A run that waits at a gate is in `keepstep_head_ready` alone. Runs without a gate are in no new index.
DROP INDEX keepstep_head_due;
DROP INDEX keepstep_head_time;
CREATE INDEX keepstep_head_due ON keepstep_head (workflow, queue, priority, due_at, run, version)
    WHERE worker IS NULL AND due_at IS NOT NULL AND gate IS NULL;
CREATE INDEX keepstep_head_time ON keepstep_head (workflow, queue, due_at, priority, run, version)
    WHERE worker IS NULL AND due_at IS NOT NULL AND gate IS NULL;
CREATE INDEX keepstep_head_ready ON keepstep_head (gate, workflow, priority, key, since, number, run, version)
    WHERE worker IS NULL AND gate IS NOT NULL;
CREATE INDEX keepstep_head_place ON keepstep_head (gate, worker) WHERE worker IS NOT NULL AND gate IS NOT NULL;
CREATE INDEX keepstep_head_key ON keepstep_head (queue, key) WHERE holds = 1 AND key IS NOT NULL;
CREATE UNIQUE INDEX keepstep_head_dedupe ON keepstep_head (queue, dedupe)
    WHERE dedupe IS NOT NULL AND status NOT IN ('completed', 'failed', 'cancelled');
-- Queues and services: what the code declares, what a person has set instead, the last changes, and where the rate, the
-- turns of keys and the breaker stand.
CREATE TABLE keepstep_gate (
    kind     TEXT NOT NULL,
    name     TEXT NOT NULL,
    declared TEXT NOT NULL DEFAULT '',
    changed  TEXT NOT NULL DEFAULT '',
    log      TEXT NOT NULL DEFAULT '',
    tat      REAL NOT NULL DEFAULT 0,
    turn     TEXT NOT NULL DEFAULT '',
    parity   INTEGER NOT NULL DEFAULT 0,
    breaker  TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
-- The places of a service that each worker may use.
CREATE TABLE keepstep_share (
    gate   TEXT NOT NULL,
    worker TEXT NOT NULL,
    held   INTEGER NOT NULL DEFAULT 0,
    need   INTEGER NOT NULL DEFAULT 0,
    since  REAL,
    PRIMARY KEY (gate, worker)
) WITHOUT ROWID;
-- When a person told a worker to take no more runs.
ALTER TABLE keepstep_worker ADD COLUMN drain_at REAL;
-- Where what is kept of a run begins: its records after the first, and its signals; 0 if nothing was removed.
ALTER TABLE keepstep_head ADD COLUMN kept_from INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keepstep_head ADD COLUMN signals_from INTEGER NOT NULL DEFAULT 0;
-- How many signals a run has read, so that the unread ones can be bounded. Older runs count as having read them all.
ALTER TABLE keepstep_head ADD COLUMN signals_read INTEGER NOT NULL DEFAULT 0;
UPDATE keepstep_head SET signals_read = signals WHERE signals > 0;
