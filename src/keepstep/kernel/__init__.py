"""Drives one run: its calls, steps, waits, replay and end."""
