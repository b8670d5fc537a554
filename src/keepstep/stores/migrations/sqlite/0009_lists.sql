-- Lists of runs by workflow, and by the time of the last change. A leased run is in neither, so that a step touches no
-- index: the few leased runs are found by their worker.
CREATE INDEX keepstep_head_workflow ON keepstep_head (workflow, status, number) WHERE worker IS NULL;
CREATE INDEX keepstep_head_updated ON keepstep_head (status, updated_at, number) WHERE worker IS NULL;
-- Runs that a person or a user's signal moves on: a wake-up does not begin with ks:, or is a verdict or a breakpoint.
CREATE INDEX keepstep_head_person ON keepstep_head (number, wakes, status, worker)
    WHERE worker IS NULL AND (status IN ('paused', 'set aside') OR status = 'waiting' AND (wakes GLOB '*[[,]"[^k]*'
        OR wakes GLOB '*[[,]"k[^s]*' OR wakes GLOB '*[[,]"ks[^:]*' OR wakes GLOB '*"ks:resolve:*'
        OR wakes GLOB '*"ks:go:*'));
CREATE INDEX keepstep_run_created ON keepstep_run (created_at);
CREATE INDEX keepstep_run_queue ON keepstep_run (queue) WHERE queue <> 'default';
CREATE INDEX keepstep_run_origin ON keepstep_run (origin) WHERE origin IS NOT NULL;
-- Runs by tag. Triggers keep it, so that it follows every change of a run's tags; most runs have none.
CREATE TABLE keepstep_tag (
    name   TEXT NOT NULL,
    value  TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (name, value, number)
) WITHOUT ROWID;
INSERT OR IGNORE INTO keepstep_tag SELECT t.key, t.value, r.number FROM keepstep_run r,
    json_each(iif(json_valid(r.tags), r.tags, '{}')) t WHERE r.tags <> '';
CREATE TRIGGER keepstep_tag_added AFTER INSERT ON keepstep_run WHEN NEW.tags <> '' BEGIN
    INSERT OR IGNORE INTO keepstep_tag SELECT t.key, t.value, NEW.number
        FROM json_each(iif(json_valid(NEW.tags), NEW.tags, '{}')) t;
END;
CREATE TRIGGER keepstep_tag_removed AFTER DELETE ON keepstep_run WHEN OLD.tags <> '' BEGIN
    DELETE FROM keepstep_tag WHERE number = OLD.number AND (name, value) IN
        (SELECT t.key, t.value FROM json_each(iif(json_valid(OLD.tags), OLD.tags, '{}')) t);
END;
CREATE TRIGGER keepstep_tag_changed AFTER UPDATE OF tags ON keepstep_run WHEN OLD.tags IS NOT NEW.tags BEGIN
    DELETE FROM keepstep_tag WHERE number = OLD.number AND (name, value) IN
        (SELECT t.key, t.value FROM json_each(iif(json_valid(OLD.tags), OLD.tags, '{}')) t);
    INSERT OR IGNORE INTO keepstep_tag SELECT t.key, t.value, NEW.number
        FROM json_each(iif(json_valid(NEW.tags), NEW.tags, '{}')) t;
END;
-- Runs whose tags cannot be read are in every list by tag, so that they are reported.
CREATE INDEX keepstep_run_unreadable ON keepstep_run (tags) WHERE tags <> '' AND NOT json_valid(tags);
