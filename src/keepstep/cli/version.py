"""The command `version`: prints the versions of Keepstep, Python and SQLite."""

from __future__ import annotations

import platform

from .settings import Settings, command


@command("version")
def version(settings: Settings) -> None:
    """Print the version of Keepstep, Python and SQLite."""
    import apsw

    from .. import __version__

    value = {"keepstep": __version__, "python": platform.python_version(), "sqlite": apsw.sqlite_lib_version()}
    settings.answer(value, f"keepstep {__version__} (Python {value['python']}, SQLite {value['sqlite']})")
