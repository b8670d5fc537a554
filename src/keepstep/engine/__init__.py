"""Drives runs in a process: the engine, the worker, the journal, and handles on runs."""
