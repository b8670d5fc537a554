"""Executes a graph: one position, one change at a time."""
