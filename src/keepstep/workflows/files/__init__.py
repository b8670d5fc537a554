"""Workflows written as YAML or JSON files."""
