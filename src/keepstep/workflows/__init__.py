"""Workflow definitions, independent of the engine that drives them."""
