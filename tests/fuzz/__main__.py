"""Fuzzes every target in turn, guided by coverage: `python -m tests.fuzz --seconds 600 [TARGET ...]`.

Each target gets its share of the time in a process of its own. What is found new is kept in a folder that is named at
the end; what broke a target is written beside it. `--keep` adds what reached new code to the corpus, as small files.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
#: No input may take longer than this, nor more memory.
SECONDS_EACH, MEGABYTES = 20, 1500
LONGEST = 4096
#: So many inputs of one session are kept for each target.
KEPT = 30


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        return _fuzz(sys.argv[2], sys.argv[3:])
    options = _options()
    from .targets import TARGETS

    names = options.targets or list(TARGETS)
    unknown = set(names) - set(TARGETS)
    if unknown:
        print(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
        return 2
    work = Path(tempfile.mkdtemp(prefix="keepstep-fuzz-"))
    share = max(5, options.seconds // len(names))
    broken = [name for name in names if not _run(name, share, work, keep=options.keep)]
    print(
        f"{len(names)} targets, {share} s each: "
        + (f"{', '.join(broken)} broke, see {work}" if broken else "nothing broke")
    )
    return 1 if broken else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--keep", action="store_true", help="add what reached new code to the corpus")
    return parser.parse_args()


def _run(name: str, seconds: int, work: Path, *, keep: bool) -> bool:
    found, kept = work / name, CORPUS / name
    found.mkdir()
    kept.mkdir(parents=True, exist_ok=True)
    limits = [f"-timeout={SECONDS_EACH}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}", "-print_final_stats=1"]
    ours = [sys.executable, "-m", "tests.fuzz", "--one", name]
    print(f"== {name}", flush=True)
    crash = f"-artifact_prefix={work}/{name}-"
    command = [*ours, *limits, crash, f"-max_total_time={seconds}", str(found), str(kept)]
    with (work / f"{name}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    lines = (work / f"{name}.log").read_text(errors="replace").splitlines()
    for line in lines[-60:] if done.returncode else [one for one in lines if "cov:" in one][-1:]:
        print(f"   {line}")
    if keep:  # the fuzzer has left there what reached something new; small inputs say the most
        for path in sorted(found.iterdir(), key=lambda one: one.stat().st_size)[:KEPT]:
            shutil.copy(path, kept / path.name[:12])
    return done.returncode == 0


def _fuzz(name: str, rest: list[str]) -> int:
    import atheris

    with atheris.instrument_imports(include=["keepstep"]):
        from .targets import TARGETS
    atheris.Setup([sys.argv[0], *rest], TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
