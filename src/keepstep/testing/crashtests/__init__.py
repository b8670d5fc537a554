"""Crash tests: they kill a user's workflow at every write and judge its recovery."""
