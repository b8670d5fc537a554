-- What is true of the whole store: the version of this schema.
CREATE TABLE keepstep_meta (
    name  text PRIMARY KEY,
    value text NOT NULL
);

-- The order in which runs were created.
CREATE SEQUENCE keepstep_number;

-- What never changes about a run (its data key may be wrapped anew). Text compares byte by byte, as in every store.
CREATE TABLE keepstep_run (
    id          text COLLATE "C" PRIMARY KEY,
    number      bigint NOT NULL,
    workflow    text COLLATE "C" NOT NULL,
    version     text COLLATE "C" NOT NULL,
    fingerprint text NOT NULL,
    queue       text NOT NULL,
    priority    bigint NOT NULL,
    input       bytea NOT NULL,
    seed        text NOT NULL,
    parent      text COLLATE "C",
    parent_key  text,
    origin      text,
    key         text,
    tags        text[] NOT NULL,
    deadline_at timestamptz,
    traceparent text,
    created_at  timestamptz NOT NULL,
    created_by  text NOT NULL,
    data_key    text NOT NULL
);
CREATE INDEX keepstep_run_number ON keepstep_run (number);
CREATE INDEX keepstep_run_parent ON keepstep_run (parent, number) WHERE parent IS NOT NULL;
CREATE INDEX keepstep_run_tags ON keepstep_run USING gin (tags) WHERE tags <> '{}';

-- What changes with every step: a narrow row with room beside it, so that a step rewrites it in place and touches no
-- index. It repeats what a claim and a list ask for.
CREATE TABLE keepstep_head (
    run        text COLLATE "C" PRIMARY KEY,
    number     bigint NOT NULL,
    workflow   text COLLATE "C" NOT NULL,
    version    text COLLATE "C" NOT NULL,
    priority   bigint NOT NULL,
    status     text COLLATE "C" NOT NULL,
    seq        bigint NOT NULL,
    checksum   text NOT NULL,
    epoch      bigint NOT NULL,
    worker     text COLLATE "C",
    due_at     timestamptz,
    wakes      text NOT NULL,
    signals    bigint NOT NULL,
    recoveries bigint NOT NULL,
    updated_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX keepstep_head_due ON keepstep_head (workflow, priority, due_at, run, version)
    WHERE worker IS NULL AND due_at IS NOT NULL;
CREATE INDEX keepstep_head_owner ON keepstep_head (worker, workflow, run, version) WHERE worker IS NOT NULL;
CREATE INDEX keepstep_head_status ON keepstep_head (status, number);
CREATE INDEX keepstep_head_workflow ON keepstep_head (workflow, status, number);

-- The history of every run. A record is kept as the bytes that were sealed; a large value beside it is packed already.
CREATE TABLE keepstep_checkpoint (
    run    text COLLATE "C" NOT NULL,
    seq    bigint NOT NULL,
    kind   text NOT NULL,
    record bytea NOT NULL,
    body   bytea,
    PRIMARY KEY (run, seq)
);
ALTER TABLE keepstep_checkpoint ALTER COLUMN body SET STORAGE EXTERNAL;

-- Messages to runs.
CREATE TABLE keepstep_signal (
    run      text COLLATE "C" NOT NULL,
    seq      bigint NOT NULL,
    name     text NOT NULL,
    payload  bytea NOT NULL,
    id       text COLLATE "C" NOT NULL,
    sender   text NOT NULL,
    sent_at  timestamptz NOT NULL,
    checksum text NOT NULL,
    PRIMARY KEY (run, seq)
);
CREATE UNIQUE INDEX keepstep_signal_id ON keepstep_signal (run, id) WHERE id <> '';

-- Workers and their newest heartbeat. `lock` is the advisory lock that the worker holds in a session of its own, whose
-- end proves its death; without one only its lease tells. `gone_at` marks one that was given up for dead: its id is never valid again.
CREATE TABLE keepstep_worker (
    id           text COLLATE "C" PRIMARY KEY,
    host         text NOT NULL,
    pid          bigint NOT NULL,
    started_at   timestamptz NOT NULL,
    renewed_at   timestamptz NOT NULL,
    boot         text NOT NULL,
    boot_seconds double precision NOT NULL,
    workflows    text NOT NULL,
    progress     bytea NOT NULL,
    lock         bigint,
    gone_at      timestamptz
) WITH (fillfactor = 50);
