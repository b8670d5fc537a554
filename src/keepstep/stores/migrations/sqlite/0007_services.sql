-- A run that waits at a service may also have a time; it is claimed then, whether or not the service has a place.
CREATE INDEX keepstep_head_timed ON keepstep_head (due_at)
    WHERE worker IS NULL AND due_at IS NOT NULL AND gate >= 'service/' AND gate < 'service0';
