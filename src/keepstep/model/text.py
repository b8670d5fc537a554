"""Text that is shown on one line, such as a message of an exception in the log."""

from __future__ import annotations


def one_line(text: object) -> str:
    """Return text on one line with control characters spelt out, so that it cannot imitate other lines."""
    flat = " ".join(str(text).split())
    return flat if flat.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in flat)
