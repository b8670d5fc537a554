"""The command that lets a run go on, as a person would type it here."""

from __future__ import annotations

import os
import shlex

#: The store that commands use without `--store`.
DEFAULT_STORE = ".keepstep/runs.db"


def shown_url(url: str) -> str:
    """Return the shortest name of a store from the current folder."""
    scheme = "files:" if url.startswith("files:") else ""
    path = url.removeprefix("sqlite:///").removeprefix("files:")
    try:
        path = os.path.relpath(path) if path.startswith(os.getcwd()) else path  # noqa: PTH109 - compared as text
    except OSError:
        return url
    return scheme + path


def retry_command(run_id: str, url: str) -> str:
    """Return the command that retries a run; "" for a store in memory, which no other process can open."""
    if url.startswith("memory:"):
        return ""
    store = shown_url(url)
    named = () if store in (DEFAULT_STORE, os.environ.get("KEEPSTEP_STORE")) else ("--store", store)
    return shlex.join(("keepstep", "retry", run_id, *named))
