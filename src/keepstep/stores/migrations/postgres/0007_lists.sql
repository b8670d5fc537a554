-- Runs that a person or a user's signal moves on: a wake-up does not begin with ks:, or is a verdict or a breakpoint.
-- No index holds updated_at: a step changes it, and would then have to write to every index of the head.
CREATE INDEX keepstep_head_person ON keepstep_head (number) WHERE worker IS NULL AND (status IN ('paused', 'set aside')
    OR status = 'waiting' AND wakes ~ '[[,]"(?!ks:)|"ks:(resolve|go):');
CREATE INDEX keepstep_run_created ON keepstep_run (created_at, number);
CREATE INDEX keepstep_run_queue ON keepstep_run (queue, number) WHERE queue <> 'default';
-- Compared with the id of a run, byte by byte.
CREATE INDEX keepstep_run_origin ON keepstep_run (origin COLLATE "C") WHERE origin IS NOT NULL;
