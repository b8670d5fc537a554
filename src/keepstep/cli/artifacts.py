"""The command `artifacts`: lists the files beside the store that runs refer to, fetches one, and verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import Settings, command

if TYPE_CHECKING:
    from ..engine.artifacts import ArtifactInfo
    from ..engine.engine import Engine

_ACTS = ("list", "get", "verify", "sweep")


@command("artifacts")
@click.argument("act", default="list", type=click.Choice(_ACTS), metavar="[ACT]")
@click.argument("digest", required=False, metavar="[DIGEST]")
@click.argument("file", required=False, metavar="[FILE]", type=click.Path(path_type=Path))
def artifacts(settings: Settings, *, act: str, digest: str | None, file: Path | None) -> int:
    """List artifacts, write one into a file, verify all, or remove those that nothing refers to.

    ACT is list, get, verify or sweep. DIGEST may be the beginning of a digest. Exit code 1 if an artifact is missing or
    damaged.
    """
    if act == "get":
        if digest is None or file is None:
            raise click.UsageError("name the artifact and the file: keepstep artifacts get DIGEST FILE")
        return _get(settings, digest, file)
    if digest is not None and act != "list":
        raise click.UsageError(f"keepstep artifacts {act} takes no digest")
    if act == "list":
        return _list(settings, digest or "")
    if act == "verify":
        problems = settings.talk(lambda engine: engine.artifacts.verify())
        settings.answer({"problems": list(problems)}, "\n".join(problems) or "all artifacts are as they were written")
        return errors.FAILED if problems else errors.OK
    removed = settings.talk(lambda engine: engine.artifacts.sweep())
    settings.answer({"removed": removed}, f"removed {removed}")
    return errors.OK


def _list(settings: Settings, prefix: str) -> int:
    from . import formatting

    async def look(engine: Engine) -> Sequence[ArtifactInfo]:
        return [one for one in await engine.artifacts.list() if one.digest.startswith(prefix)]

    found = settings.talk(look)

    def shown() -> str:
        rows = [
            (one.digest[:16], f"{one.size:,}", formatting.one_line(", ".join(one.names)), ", ".join(one.runs[:3]))
            for one in found
        ]
        return formatting.table(("DIGEST", "BYTES", "NAME", "RUNS"), rows) if rows else "no artifact"

    plain: list[dict[str, Any]] = [
        {"digest": one.digest, "size": one.size, "names": list(one.names), "runs": list(one.runs)} for one in found
    ]
    settings.answer({"artifacts": plain}, shown)
    return errors.OK


def _get(settings: Settings, digest: str, file: Path) -> int:
    from ..engine.artifacts import Artifact

    async def fetch(engine: Engine) -> str:
        found = [one for one in await engine.artifacts.list() if one.digest.startswith(digest)]
        if len(found) != 1:
            hint = "list them with keepstep artifacts" if not found else "write more of its digest"
            raise errors.Refused(f"{len(found)} artifacts begin with {digest!r}", hint, errors.NOT_FOUND)
        with engine.artifacts.open(Artifact(found[0].digest, found[0].size)) as source, file.open("xb") as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)
        return found[0].digest

    try:
        whole = settings.talk(fetch)
    except FileExistsError:
        raise errors.Refused(f"{file} exists already; choose another name") from None
    settings.answer({"digest": whole, "file": str(file)}, f"written to {file}")
    return errors.OK
