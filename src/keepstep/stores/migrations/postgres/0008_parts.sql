-- The part of the history in which the records of a run lie. A history that is not divided has part 0 alone; in a
-- divided one each part is a table, which is dropped when no run is left in it. Both columns cost no rewrite of a table.
ALTER TABLE keepstep_head ADD COLUMN part integer NOT NULL DEFAULT 0;
ALTER TABLE keepstep_checkpoint ADD COLUMN part integer NOT NULL DEFAULT 0;
-- The parts of a divided history: when each began, and the number of the newest run then. New runs go to the newest.
CREATE TABLE keepstep_part (
    part     integer PRIMARY KEY,
    began_at timestamptz NOT NULL,
    first    bigint NOT NULL
);
-- Heads that a repair has put aside, and records, if there are any, keep the columns of their tables.
ALTER TABLE IF EXISTS keepstep_aside_head ADD COLUMN part integer NOT NULL DEFAULT 0;
ALTER TABLE IF EXISTS keepstep_aside_checkpoint ADD COLUMN part integer NOT NULL DEFAULT 0;
-- Vacuum comes soon and does little each time: it does not wait until a fifth of a large table has changed. That of heads
-- does not rest, because claims read their indexes.
ALTER TABLE keepstep_head SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0);
ALTER TABLE keepstep_run SET (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE keepstep_checkpoint SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05);
ALTER TABLE keepstep_signal SET (autovacuum_vacuum_scale_factor = 0.05);
-- Every birth of a run reads the new table, so each role that reads heads may read it, too.
DO $$ DECLARE statement text; BEGIN
    FOR statement IN SELECT format('GRANT SELECT ON keepstep_part TO %s',
            CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
        FROM pg_class c, aclexplode(c.relacl) a
        WHERE c.oid = 'keepstep_head'::regclass AND a.privilege_type = 'SELECT' AND a.grantee <> c.relowner
    LOOP EXECUTE statement; END LOOP;
END $$;
