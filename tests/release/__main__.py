"""Builds what is released, and proves that it works where nothing else is: `python -m tests.release`, or `make dist`.

It takes the files of the newest commit, builds them twice and compares the bytes, and builds the wheel again from the
source distribution. It installs the wheel into a clean environment on every Python found, and runs the demo and a
workflow there. It writes the bill of materials of such an environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.release.build import ROOT, build, changed, exported

#: A workflow for a clean environment: it crosses the store, a signal and the command line.
PROGRAM = """
import keepstep as ks


@ks.step
async def add(a: int, b: int) -> int:
    return a + b


@ks.workflow
async def total(a: int, b: int) -> int:
    return await add(a, b)


if __name__ == "__main__":
    with ks.open("files:runs") as engine:
        assert engine.start(total, 1, 2).result() == 3
    assert "site-packages" in ks.__file__, ks.__file__
"""


def pythons() -> list[tuple[str, str]]:
    """Version and path of every supported Python that is found."""
    lines = subprocess.run([ROOT / ".ci" / "pythons"], capture_output=True, text=True, check=True).stdout
    return [tuple(line.split(maxsplit=1)) for line in lines.splitlines()]  # type: ignore[misc]


def run(*words: object, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KEEPSTEP_"))}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check(python: str, wheel: Path, place: Path) -> Path:
    """Install the wheel into a clean environment, and use it there. Returns the environment's Python."""
    place.mkdir()
    run(python, "-m", "venv", "env", cwd=place)
    own = place / "env" / "bin" / "python"
    run(own, "-m", "pip", "install", "--quiet", wheel, cwd=place)
    run(own, "-m", "pip", "check", cwd=place)
    (place / "program.py").write_text(PROGRAM, encoding="utf-8")
    run(own, "program.py", cwd=place)
    keepstep = own.parent / "keepstep"
    run(keepstep, "version", cwd=place)
    run(keepstep, "demo", cwd=place)
    answer = run(keepstep, "run", "program.py:total", "20", "22", cwd=place)
    if answer.strip() != "42":
        sys.exit(f"{python}: keepstep run printed {answer!r}")
    return own


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files are put")
    parser.add_argument("--no-check", action="store_true", help="only build")
    options = parser.parse_args()
    found = pythons()
    if not found:
        sys.exit("no supported Python was found")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if changes := changed():
            print(f"not in the release, because it is not committed: {', '.join(changes)}", file=sys.stderr)
        first, second = (build(exported(place / name / "source"), place / name / "made") for name in ("a", "b"))
        for one, other in zip(first, second, strict=True):
            if one.read_bytes() != other.read_bytes():
                sys.exit(f"{one.name} is not reproducible: two builds differ")
        options.out.mkdir(exist_ok=True)
        for file in first:
            (options.out / file.name).write_bytes(file.read_bytes())
            print(options.out / file.name)
        if options.no_check:
            return
        wheel = next(file for file in first if file.suffix == ".whl")
        own = Path()
        for version, python in found:
            own = check(python, wheel, place / version)
            print(f"Python {version}: installed into a clean environment, and works")
        extras = "encryption,fast,postgres,yaml"
        run(own, "-m", "pip", "install", "--quiet", f"keepstep[{extras}] @ {wheel.as_uri()}", cwd=place)
        text = run(own, ROOT / "tests" / "release" / "sbom.py", "keepstep", wheel, cwd=place)
        bom = options.out / f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json"
        bom.write_text(text, encoding="utf-8")
        print(bom)


if __name__ == "__main__":
    main()
