-- What is true of the whole store: the version of this schema.
CREATE TABLE keepstep_meta (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- What never changes about a run. Times are seconds since 1970, UTC. `number` is the order of creation.
CREATE TABLE keepstep_run (
    number      INTEGER PRIMARY KEY,
    id          TEXT NOT NULL UNIQUE,
    workflow    TEXT NOT NULL,
    version     TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    queue       TEXT NOT NULL,
    priority    INTEGER NOT NULL,
    input       TEXT NOT NULL,
    seed        TEXT NOT NULL,
    parent      TEXT,
    parent_key  TEXT,
    origin      TEXT,
    key         TEXT,
    tags        TEXT NOT NULL,
    deadline_at REAL,
    traceparent TEXT,
    created_at  REAL NOT NULL
);
CREATE INDEX keepstep_run_parent ON keepstep_run (parent) WHERE parent IS NOT NULL;

-- What changes with every step: a narrow row, so that a large input is never written again. It repeats what a claim
-- asks for, so that a claim reads one index.
CREATE TABLE keepstep_head (
    run        TEXT PRIMARY KEY,
    number     INTEGER NOT NULL,
    workflow   TEXT NOT NULL,
    version    TEXT NOT NULL,
    queue      TEXT NOT NULL,
    priority   INTEGER NOT NULL,
    status     TEXT NOT NULL,
    seq        INTEGER NOT NULL,
    checksum   TEXT NOT NULL,
    epoch      INTEGER NOT NULL,
    worker     TEXT,
    due_at     REAL,
    wakes      TEXT NOT NULL,
    signals    INTEGER NOT NULL,
    recoveries INTEGER NOT NULL,
    updated_at REAL NOT NULL
) WITHOUT ROWID;
-- A leased run is in none of these but the second and third, whose columns a step does not touch.
CREATE INDEX keepstep_head_due ON keepstep_head (workflow, priority, due_at, run, version)
    WHERE worker IS NULL AND due_at IS NOT NULL;
CREATE INDEX keepstep_head_owner ON keepstep_head (worker, workflow, run, version) WHERE worker IS NOT NULL;
CREATE INDEX keepstep_head_status ON keepstep_head (status, number);

-- The history of every run, in the order of writing. With (run, seq) as the table's own key, a batch over 200 runs
-- touches 200 pages of records; appending them touches a few, and costs 10 µs a record instead of 25 (measured with
-- 300-byte records; one commit per record costs the same either way).
CREATE TABLE keepstep_checkpoint (
    run    TEXT NOT NULL,
    seq    INTEGER NOT NULL,
    kind   TEXT NOT NULL,
    record TEXT NOT NULL,
    body   BLOB
);
CREATE UNIQUE INDEX keepstep_checkpoint_place ON keepstep_checkpoint (run, seq);

-- Messages to runs. `position` is the order of arrival over all runs and is never used again.
CREATE TABLE keepstep_signal (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    run      TEXT NOT NULL,
    seq      INTEGER NOT NULL,
    name     TEXT NOT NULL,
    payload  TEXT NOT NULL,
    id       TEXT NOT NULL,
    sender   TEXT NOT NULL,
    sent_at  REAL NOT NULL
);
CREATE UNIQUE INDEX keepstep_signal_place ON keepstep_signal (run, seq);
CREATE UNIQUE INDEX keepstep_signal_id ON keepstep_signal (run, id) WHERE id <> '';

-- Workers and their newest heartbeat, by the clock that counts from the boot. `gone_at` marks one that was given up
-- for dead: its id is never valid again.
CREATE TABLE keepstep_worker (
    id           TEXT PRIMARY KEY,
    host         TEXT NOT NULL,
    pid          INTEGER NOT NULL,
    started_at   REAL NOT NULL,
    renewed_at   REAL NOT NULL,
    boot         TEXT NOT NULL,
    boot_seconds REAL NOT NULL,
    workflows    TEXT NOT NULL,
    progress     TEXT NOT NULL,
    gone_at      REAL
) WITHOUT ROWID;
