"""Runs what a page of the documentation shows, from top to bottom, in the current directory.

Blocks are fenced with three backticks and a language, and may be marked after it:

    python             run; all blocks of a page share one namespace, and may await at the top level
    python no-run      only compiled
    python file=x.py   saved under this name, for a command that runs it
    console run        its lines that start with "$ " are run by a shell, where `keepstep` is the command under test
    console            shown only, as is every other language
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<ticks>`{3,})(?P<info>.*)")
_MARKS = {"python": re.compile(r"no-run|file=[\w.-]+"), "console": re.compile(r"run")}


@dataclass(frozen=True)
class Block:
    language: str
    marks: tuple[str, ...]
    line: int  # of its first line within the page
    text: str

    @property
    def file(self) -> str:
        return next((mark.removeprefix("file=") for mark in self.marks if mark.startswith("file=")), "")

    @property
    def runs(self) -> bool:
        if self.language == "python":
            return "no-run" not in self.marks and not self.file
        return self.language == "console" and "run" in self.marks

    @property
    def commands(self) -> list[str]:
        """The lines after "$ "; one that ends in a backslash goes on in the next."""
        joined = self.text.replace("\\\n", "")
        return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page; a fence that is not closed, or a mark that is not known, is an error."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.splitlines(), 1):
        fence = _FENCE.fullmatch(line)
        if opened is None:
            if fence:
                opened, lines = (fence["ticks"], fence["info"].strip(), number), []
        elif fence and fence["ticks"] == opened[0] and not fence["info"].strip():
            found.append(_block(opened[1], opened[2] + 1, lines))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"the block that starts in line {opened[2]} is not closed")
    return found


def _block(info: str, line: int, lines: list[str]) -> Block:
    language, *marks = info.split() or [""]
    for mark in marks:
        if language in _MARKS and not _MARKS[language].fullmatch(mark):
            raise ValueError(f"line {line - 1}: {language} blocks know no mark {mark!r}")
    return Block(language, tuple(marks), line, textwrap.dedent("\n".join(lines)) + "\n")


def compiled(block: Block, path: str):
    """The block's code, with the page's own line numbers, so that a traceback points into the page."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile("\n" * (block.line - 1) + block.text, path, "exec", flags=flags, dont_inherit=True)


def run(path: Path) -> None:
    """Run every block of a page that is meant to run."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path[0] = str(Path.cwd())  # as for a program that is kept beside its files
    with asyncio.Runner() as runner:
        for block in blocks(path.read_text(encoding="utf-8")):
            if block.file:
                Path(block.file).write_text(block.text, encoding="utf-8")
            elif block.runs and block.language == "python":
                code = compiled(block, str(path))
                if code.co_flags & inspect.CO_COROUTINE:
                    runner.run(eval(code, module.__dict__))
                else:
                    exec(code, module.__dict__)
            elif block.runs:
                for command in block.commands:
                    shell(command, f"{path}:{block.line}")


def shell(command: str, where: str) -> None:
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], env=_environment(), check=False)
    if done.returncode:
        raise SystemExit(f"{where}: `{command}` ended with {done.returncode}")


def _environment() -> dict[str, str]:
    """Where `python` and `keepstep` are the ones under test, installed or not."""
    shims = Path(".shims").resolve()
    shims.mkdir(exist_ok=True)
    python = shlex.quote(sys.executable)
    main = shlex.quote("import sys; sys.argv[0] = 'keepstep'; from keepstep.cli import main; sys.exit(main())")
    for name, line in (("python", f'exec {python} "$@"'), ("keepstep", f'exec {python} -c {main} "$@"')):
        (shims / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (shims / name).chmod(0o755)
    return {**os.environ, "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}"}


if __name__ == "__main__":
    run(Path(sys.argv[1]))
