"""Where runs live: one file per store; `open.py` finds them, `rules.py` holds what they all decide alike."""
