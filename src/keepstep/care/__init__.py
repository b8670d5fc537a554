"""Looks after a store: verify, repair, archive, move, retention, doctor."""
