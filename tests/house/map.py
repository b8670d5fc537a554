"""Writes docs/contributing/map.md: one line for each module, taken from the first sentence of its docstring.

`python -m tests.house.map` prints the page; with `--write` it replaces the file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "keepstep"
PAGE = ROOT / "docs" / "contributing" / "map.md"
#: From the page to the source tree.
TO_SOURCE = "../../src/keepstep"

INTRODUCTION = """\
# Map of the modules

One line for each module: the first sentence of its docstring. [The architecture](../explanation/architecture.md) says
how the rooms depend on each other; [how to change something](change.md) says which files a change touches.

This page is generated. After adding, renaming or rewording a module, run `python -m tests.house.map --write`.
"""


def first_sentence(path: Path) -> str:
    """Return the first line of a module's docstring; the house rules make it one sentence."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0]


def modules(source: Path = SOURCE) -> list[Path]:
    """Return the modules of a package, relative to it, sorted by room and name."""
    found = (path.relative_to(source) for path in source.rglob("*.py"))
    return sorted(found, key=lambda path: (path.parent.parts, path.name != "__init__.py", path.name))


def lines(source: Path = SOURCE) -> Iterator[str]:
    """Yield the lines of the page, one table for each folder."""
    yield INTRODUCTION
    for folder, group in groupby(modules(source), key=lambda path: path.parent):
        yield f"## {'/'.join(('keepstep', *folder.parts))}\n"
        yield "| module | purpose |"
        yield "|---|---|"
        for path in group:
            name = "the package" if path.name == "__init__.py" else path.stem
            sentence = first_sentence(source / path).replace("|", "\\|")
            yield f"| [{name}]({TO_SOURCE}/{path.as_posix()}) | {sentence} |"
        yield ""


def page(source: Path = SOURCE) -> str:
    """Return the whole page."""
    return "\n".join(lines(source))


def main(arguments: list[str]) -> None:
    if "--write" in arguments:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main(sys.argv[1:])
