"""Executors, which run the bodies of steps."""
