"""How jobs are measured: each in fresh processes, ours and the floor in turn, so that both meet the same weather."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .gauges import MEGABYTE

ROOT = Path(__file__).parents[1]
#: Longest that one process may take.
PATIENCE_SECONDS = 900.0
#: The libraries that the floor is built on; the faster one counts.
LIBRARIES = ("sqlite3", "apsw")
#: How often ours and the floor do a job within one process.
LASTS = {"j1": (1, 2), "j2": (3, 9), "j3": (1, 4), "j4": (15, 60)}


@dataclass
class Finding:
    """One line of the table. `ratio` is ours in terms of the floor; a target speaks of one of the two."""

    job: str
    what: str
    ours: float
    unit: str
    floor: float | None = None
    ratio: float | None = None
    least_ratio: float | None = None
    most: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool | None:
        if self.detail.get("repeated", 0) > 1:  # at most the body in which the run was killed
            return False
        if self.least_ratio is not None and self.ratio is not None:
            return self.ratio >= self.least_ratio
        if self.most is not None:
            return self.ours <= self.most
        return None

    @property
    def sure(self) -> bool:
        """Whether every round says the same about the target; the middle of rounds that disagree proves little."""
        ratios = self.detail.get("ratios")
        return not ratios or self.least_ratio is None or not min(ratios) < self.least_ratio <= max(ratios)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached, "sure": self.sure}


@dataclass(frozen=True)
class Effort:
    """How long to look: `quick` makes every job small."""

    quick: bool = False

    def rounds(self, full: int) -> int:
        return 2 if self.quick else full

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full


# -- processes ---------------------------------------------------------------------------------------------------------


@contextmanager
def folder() -> Iterator[Path]:
    """A fresh folder on the disk to be measured: BENCH_DIR, or where temporary files go."""
    base = os.environ.get("BENCH_DIR")
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-", dir=base, ignore_cleanup_errors=True) as made:
        yield Path(made)


def begin(side: str, job: str, where: Path, options: dict[str, Any], **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.child", side, job, str(where), json.dumps(options)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(process.args[3:6])} ended with {process.returncode}")  # type: ignore[index]
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


def run(side: str, job: str, where: Path | None = None, **options: Any) -> dict[str, Any]:
    """Do one job in a fresh process, and in a fresh folder unless one is given."""
    if where is not None:
        return finish(begin(side, job, where, options))
    with folder() as fresh:
        return finish(begin(side, job, fresh, options))


# -- rates -------------------------------------------------------------------------------------------------------------


def _rate(job: str, what: str, unit: str, least: float, effort: Effort, **options: Any) -> list[Finding]:
    """Ours and the floor in turn; the ratio of each round is taken between neighbours, and the middle one counts."""
    ours: list[dict[str, Any]] = []
    floors: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for _ in range(effort.rounds(5)):
        # What lasts a tenth of a second rides on what the scheduler owes a new process: both sides last about as long.
        ours.append(run("ours", job, times=LASTS[job][0], **options))
        for library in LIBRARIES:
            floor = run("floor", job, times=LASTS[job][1], library=library, **options)
            floors[library].append(floor["per_second"])
    best = max(floors, key=lambda library: statistics.median(floors[library]))
    rates = [one["per_second"] for one in ours]
    ratios = [rate / other for rate, other in zip(rates, floors[best], strict=True)]
    return [
        Finding(
            job,
            what,
            statistics.median(rates),
            unit,
            floor=statistics.median(floors[best]),
            ratio=statistics.median(ratios),
            least_ratio=least,
            detail={
                "rounds": len(rates),
                "ours": rates,
                "floors": floors,
                "floor_library": best,
                "ratios": ratios,
                "cpu_us": statistics.median(one["cpu_us"] for one in ours),
            },
        )
    ]


def j1(effort: Effort) -> list[Finding]:
    return _rate("j1", "one run, one step after the other", "steps/s", 0.6, effort, n=effort.size(1000, 200))


def j2(effort: Effort) -> list[Finding]:
    """Beside the floor, and beside the least that keeps the same promises: what pure Python can reach at all."""
    options = {"runs": effort.size(200, 50)}
    takes = [
        (run("ours", "j2", times=LASTS["j2"][0], **options), run("least", "j2", times=2 * LASTS["j2"][0], **options))
        for _ in range(effort.rounds(5))
    ]
    return [
        *_rate("j2", "200 runs of 20 steps at once", "steps/s", 0.4, effort, **options),
        _beside("j2", "… beside the least that keeps the same promises", takes, None),
    ]


def j3(effort: Effort) -> list[Finding]:
    return _rate("j3", "2,000 runs of one step", "runs/s", 0.3, effort, runs=effort.size(2000, 300))


def j4(effort: Effort) -> list[Finding]:
    return _rate("j4", "500 parallel steps in one run", "steps/s", 0.25, effort, n=effort.size(500, 100))


def dag(effort: Effort) -> list[Finding]:
    """A dag beside the same steps through ks.map, which need nothing of each other."""
    options = {"layers": effort.size(50, 10), "width": 20, "times": 5}
    whats = (
        "a dag of 1,000 steps in 50 layers, beside the same steps through ks.map",
        "… given the results of their needs",
    )
    findings = []
    for given, what in enumerate(whats):
        takes = [
            (run("ours", "dag", given=bool(given), **options), run("ours", "dag_mapped", **options))
            for _ in range(effort.rounds(5))
        ]
        ratios = [ours["per_second"] / mapped["per_second"] for ours, mapped in takes]
        findings.append(
            Finding(
                "dag",
                what,
                statistics.median(ours["per_second"] for ours, _ in takes),
                "steps/s",
                floor=statistics.median(mapped["per_second"] for _, mapped in takes),
                ratio=statistics.median(ratios),
                least_ratio=None if given else 0.5,
                detail={"takes": takes, "ratios": ratios},
            )
        )
    return findings


def files(effort: Effort) -> list[Finding]:
    """A store in files beside the least that its promise takes: a file for each step, content and name synced."""
    findings = []
    for job, what, options in (
        ("j1", "one run, one step after the other, in files", {"n": effort.size(500, 100)}),
        ("j2", "200 runs of 20 steps at once, in files", {"runs": effort.size(200, 50)}),
    ):
        takes = [
            (run("ours", job, store="files", **options), run("floor", f"files_{job}", **options))
            for _ in range(effort.rounds(5))
        ]
        ratios = [ours["per_second"] / floor["per_second"] for ours, floor in takes]
        findings.append(
            Finding(
                "files",
                what,
                statistics.median(ours["per_second"] for ours, _ in takes),
                "steps/s",
                floor=statistics.median(floor["per_second"] for _, floor in takes),
                ratio=statistics.median(ratios),
                detail={"takes": takes, "ratios": ratios},
            )
        )
    return findings


# -- graphs ------------------------------------------------------------------------------------------------------------


def graph(effort: Effort) -> list[Finding]:
    """A graph beside the function workflow of the same steps, and a long one that was killed."""
    findings = []
    for job, what, least, options in (
        ("j1", "a graph of 1,000 steps one after the other; beside it the function workflow", 0.8, {"n": (1000, 200)}),
        ("j2", "200 graphs of 20 steps at once; beside them function workflows", None, {"runs": (200, 50)}),
    ):
        sizes = {name: effort.size(*size) for name, size in options.items()}
        takes = [
            (run("graphs", job, times=LASTS[job][0], **sizes), run("ours", job, times=LASTS[job][0], **sizes))
            for _ in range(effort.rounds(5))
        ]
        findings.append(_beside("graph", what, takes, least))
    return [*findings, _killed(effort.size(50_000, 5000), 0.5, "every=500", effort, side="graphs")]


def j5(effort: Effort) -> list[Finding]:
    """A large state of which every step changes a few bytes."""
    options = {"n": effort.size(100, 20)}
    takes = [(run("graphs", "j5", **options), run("floor", "j5", **options)) for _ in range(effort.rounds(5))]
    stored = statistics.median(ours["stored"] for ours, _ in takes) / MEGABYTE
    return [
        _beside("j5", "a state of 1 MB, of which 100 steps change a few bytes each", takes, 0.5),
        Finding("j5", "… on disk after close", stored, "MB", most=3.0),
    ]


def _beside(job: str, what: str, takes: list[tuple[dict[str, Any], dict[str, Any]]], least: float | None) -> Finding:
    ratios = [ours["per_second"] / other["per_second"] for ours, other in takes]
    return Finding(
        job,
        what,
        statistics.median(ours["per_second"] for ours, _ in takes),
        "steps/s",
        floor=statistics.median(other["per_second"] for _, other in takes),
        ratio=statistics.median(ratios),
        least_ratio=least,
        detail={"takes": takes, "ratios": ratios, "cpu_us": statistics.median(ours["cpu_us"] for ours, _ in takes)},
    )


# -- being killed ------------------------------------------------------------------------------------------------------


def j6(effort: Effort) -> list[Finding]:
    cases = [(500, 0.5, ""), (10_000, 1.0, "every=500"), (50_000, 3.0, "every=500")]
    return [_killed(at, limit, durability, effort) for at, limit, durability in cases[: effort.size(3, 2)]]


def _killed(at: int, limit: float, durability: str, effort: Effort, side: str = "ours") -> Finding:
    """Kill a run in the body of step `at`, and take up copies of what is left, each in a fresh process."""
    total = at * 2 if at < 1000 else at + 100
    with folder() as where:
        for name, which in (("ours", side), ("floor", "floor")):
            (where / name).mkdir()
            process = begin(
                which,
                "j6_kill",
                where / name,
                {"n": total, "at": at},
                **({"BENCH_DURABILITY": durability} if durability else {}),
            )
            process.communicate(timeout=PATIENCE_SECONDS)
        takes = [_take_up(where, observed=False, side=side) for _ in range(effort.rounds(5))]
        floors = [_take_up_floor(where, total) for _ in takes]
        seen = _take_up(where, observed=True, side=side)
    return Finding(
        "j6" if side == "ours" else "graph",
        f"SIGKILL with {at:,} steps recorded: from process start to the first new body",
        statistics.median(one["first"] for one in takes),
        "s",
        floor=statistics.median(floors),
        most=limit,
        detail={
            "seconds": [one["first"] for one in takes],
            "repeated": max(one["repeated"] for one in takes),
            "where": seen["where"],
        },
    )


def _take_up(where: Path, *, observed: bool, side: str = "ours") -> dict[str, Any]:
    with folder() as base:
        copy = base / "copy"
        shutil.copytree(where / "ours", copy)
        before = (copy / "bodies").read_text(encoding="ascii").splitlines()
        os.sync()
        began = time.monotonic()
        answer = finish(begin(side, "j6_resume", copy, {"observed": observed}))
        new = [line.split() for line in (copy / "bodies").read_text(encoding="ascii").splitlines()[len(before) :]]
    done = {line.split()[0] for line in before}
    first = float(new[0][1])
    moments = answer["moments"]
    marks = [
        ("start the interpreter", answer["importing"]),
        ("import", answer["imported"]),
        ("open the store", moments["opened"]),
        ("claim and load", moments.get("run.recovering")),
        ("replay", moments.get("run.resumed")),
        ("begin the step", first),
    ]
    spent, last = {}, began
    for name, at in marks:
        if at is not None:
            spent[name] = max(0.0, at - last)
            last = max(last, at)
    return {"first": first - began, "repeated": sum(number in done for number, _ in new), "where": spent}


def _take_up_floor(where: Path, total: int) -> float:
    with folder() as base:
        copy = base / "copy"
        shutil.copytree(where / "floor", copy)
        os.sync()
        began = time.monotonic()
        answer = finish(begin("floor", "j6_resume", copy, {"n": total}))
    return float(answer["moments"]["first body"]) - began


# -- room --------------------------------------------------------------------------------------------------------------


def j7(effort: Effort) -> list[Finding]:
    return [*_sleeping(effort), *_hoard(effort), *_parked(effort)]


def _sleeping(effort: Effort) -> list[Finding]:
    runs = effort.size(1000, 200)
    findings = []
    for held, what, most in (
        (False, f"memory that {runs:,} sleeping runs add", 4.0),
        (True, "… with a handle held on each", None),
    ):
        takes = [run("ours", "j7_sleeping", runs=runs, held=held) for _ in range(effort.rounds(3))]
        growth = statistics.median(one["growth"] for one in takes) / MEGABYTE
        findings.append(Finding("j7", what, growth, "MB", most=most, detail={"takes": takes}))
    return findings


def _hoard(effort: Effort) -> list[Finding]:
    n = effort.size(10_000, 1000)
    with folder() as where:
        made = run("ours", "j7_hoard", where, n=n)
        replayed = run("ours", "j7_replay", where, n=n)
    what = f"{n:,} results of 100 KB in one run"
    return [
        Finding("j7", f"memory that {what} add while made", made["growth"] / MEGABYTE, "MB", most=60.0, detail=made),
        Finding("j7", "… while replayed", replayed["growth"] / MEGABYTE, "MB", most=60.0, detail=replayed),
    ]


def _parked(effort: Effort) -> list[Finding]:
    """A store with many sleeping runs against one with few: what does not grow is flat."""
    many, few = effort.size(100_000, 5000), effort.size(1000, 200)
    takes = {}
    with folder() as base:
        for runs in (few, many):
            (base / str(runs)).mkdir()
            made = run("ours", "j7_park", base / str(runs), runs=runs)
            repeats = [run("ours", "j7_claims", base / str(runs)) for _ in range(effort.rounds(3))]
            takes[runs] = {
                "made": made,
                "opened": statistics.median(one["opened"] for one in repeats),
                "found": statistics.median(one["found"]["median"] for one in repeats),
                "woken": statistics.median(one["woken"]["median"] for one in repeats),
                "repeats": repeats,
            }
    names = {"opened": "opening the store", "found": "finding a due run", "woken": "waking a sleeping run by a signal"}
    return [
        Finding(
            "j7",
            f"{name} with {many:,} sleeping runs in it (the floor: with {few:,})",
            takes[many][key] * 1000,
            "ms",
            floor=takes[few][key] * 1000,
            ratio=takes[many][key] / takes[few][key],
            detail={str(runs): take for runs, take in takes.items()} if key == "opened" else {},
        )
        for key, name in names.items()
    ]


# -- signals and importing ---------------------------------------------------------------------------------------------


def _signalled(n: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The delays of signals in one process, and between two."""
    here = run("ours", "signal_here", n=n)
    with folder() as where:
        hears = begin("ours", "signal_hear", where, {"n": n})
        sends = begin("ours", "signal_send", where, {"n": n})
        finish(sends)
        return here, finish(hears)


def signal(effort: Effort) -> list[Finding]:
    here, across = _signalled(effort.size(300, 50))
    return [
        Finding(
            "signal", "from signal to the step behind wait_for, one process", here["median"] * 1000, "ms", detail=here
        ),
        Finding("signal", "… 99th percentile", here["p99"] * 1000, "ms", most=20.0),
        Finding("signal", "… between two processes on one file", across["median"] * 1000, "ms", detail=across),
        Finding("signal", "… 99th percentile", across["p99"] * 1000, "ms", most=100.0),
    ]


def readers(effort: Effort) -> list[Finding]:
    """Tokens and replies beside signals, in the same run: readers are woken as fast as runs are."""
    n = effort.size(300, 50)
    here = run("ours", "read_here", n=n)
    signalled_here, signalled = _signalled(n)
    with folder() as where:
        reads = begin("ours", "read_across", where, {"n": n})
        while not (where / "started").exists() and reads.poll() is None:
            time.sleep(0.01)
        drives = begin("ours", "read_drive", where, {"n": n})
        across = finish(reads)
        finish(drives)
    found = []
    for reader, what in (("watch", "from ks.emit to watch"), ("ask", "from reply to ask")):
        one, other = here[reader], across[reader]
        found += [
            Finding("readers", f"{what}, one process", one["median"] * 1000, "ms", most=5.0, detail=one),
            Finding(
                "readers",
                f"{what}, two processes on one file, beside a signal",
                other["median"] * 1000,
                "ms",
                floor=signalled["median"] * 1000,
                ratio=signalled["median"] / other["median"],
                least_ratio=0.8,
                detail={**other, "signal": signalled, "signal_here": signalled_here},
            ),
        ]
    return found


_OPEN = """
import asyncio, keepstep
async def main():
    async with keepstep.open("runs.db"):
        pass
asyncio.run(main())
"""


def importing(effort: Effort) -> list[Finding]:
    """Fresh processes that import the package, and that also open a store; bare ones in turn, to be subtracted."""
    codes = {"python": "pass", "import": "import keepstep", "open": _OPEN}
    seconds: dict[str, list[float]] = {name: [] for name in codes}
    with tempfile.TemporaryDirectory() as folder:
        _python(_OPEN, folder)  # compiles the modules, as installing does; later processes open the same store
        for _ in range(effort.rounds(20)):
            for name, code in codes.items():
                seconds[name].append(_python(code, folder))
    middle = {name: statistics.median(taken) for name, taken in seconds.items()}

    def finding(name: str, what: str) -> Finding:
        beyond = middle[name] - middle["python"]
        least = min(seconds[name]) - min(seconds["python"])
        return Finding("import", what, beyond, "s", most=0.15, detail={"seconds": seconds, "least": least})

    return [
        finding("import", "import keepstep, beyond the start of Python itself"),
        finding("open", "import keepstep, open a SQLite store and close it"),
    ]


def compiling(compiled: str) -> dict[str, str]:
    """Return an environment that keeps compiled modules in a folder, as installing does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    return environment | {"PYTHONPYCACHEPREFIX": compiled, "PYTHONPATH": paths}


def _python(code: str, compiled: str) -> float:
    environment = compiling(compiled)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=compiled, env=environment, check=True)
    return time.perf_counter() - began


def postgres(effort: Effort) -> list[Finding]:
    """The jobs on a PostgreSQL server, which is started for them; not imported before it is asked for."""
    from .postgres import findings

    return findings(effort)


def agents(effort: Effort) -> list[Finding]:
    """Agents of other frameworks with and without Keepstep; these frameworks are slow to import."""
    from .agent_calls import findings

    return findings(effort)


def queues(effort: Effort) -> list[Finding]:
    """Queues with limits, on SQLite and on a PostgreSQL server; not imported before they are asked for."""
    from .queues import findings

    return findings(effort)


def services(effort: Effort) -> list[Finding]:
    """Services with limits, on SQLite and on a PostgreSQL server; not imported before they are asked for."""
    from .services import findings

    return findings(effort)


def saver(effort: Effort) -> list[Finding]:
    """The saver for LangGraph beside LangGraph's own."""
    from . import saver as jobs

    return jobs.findings(effort)


def topics(effort: Effort) -> list[Finding]:
    """Messages of a topic, on SQLite and on a PostgreSQL server; not imported before they are asked for."""
    from .topics import findings

    return findings(effort)


def processes(effort: Effort) -> list[Finding]:
    """Steps in processes beside a bare pool of processes."""
    from .executors import findings

    return findings(effort)


def on_ray(effort: Effort) -> list[Finding]:
    """Steps on Ray beside plain tasks of Ray."""
    from .ray import findings

    return findings(effort)


def telemetry(effort: Effort) -> list[Finding]:
    """What telemetry costs many runs at once."""
    from .telemetry import findings

    return findings(effort)


def large_map(effort: Effort) -> list[Finding]:
    """A map of 100,000 items: memory, speed and bytes."""
    from .maps import findings

    return findings(effort)


def lists(effort: Effort) -> list[Finding]:
    """First pages and counts of many runs, on SQLite and on a server; not imported before they are asked for."""
    from .lists import findings

    return findings(effort)


def fleet(effort: Effort) -> list[Finding]:
    """A fleet on one PostgreSQL server; not imported before it is asked for."""
    from .fleet import findings

    return findings(effort)


def web(effort: Effort) -> list[Finding]:
    """The cost of pages: the start of a server, open pages, and a long timeline."""
    from .web import findings

    return findings(effort)


def storage(effort: Effort) -> list[Finding]:
    """The removal of old records from PostgreSQL, and the growth of heads beside an old transaction."""
    from .storage import findings

    return findings(effort)


def dask(effort: Effort) -> list[Finding]:
    """Steps on a Dask cluster of this machine, which is started for them."""
    from .dask import findings

    return findings(effort)


JOBS: dict[str, Callable[[Effort], list[Finding]]] = {
    "j1": j1,
    "j2": j2,
    "j3": j3,
    "j4": j4,
    "dag": dag,
    "dask": dask,
    "graph": graph,
    "files": files,
    "j5": j5,
    "j6": j6,
    "j7": j7,
    "signal": signal,
    "readers": readers,
    "import": importing,
    "postgres": postgres,
    "fleet": fleet,
    "agents": agents,
    "queues": queues,
    "services": services,
    "saver": saver,
    "topics": topics,
    "lists": lists,
    "processes": processes,
    "map": large_map,
    "storage": storage,
    "ray": on_ray,
    "telemetry": telemetry,
    "web": web,
}
