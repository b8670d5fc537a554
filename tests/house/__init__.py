"""Measures and maps of the source tree, kept up to date by tests."""
