"""The pytest plugin in a real pytest, which finds it by the package's entry point."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.crash

TESTS = """
import pytest
import keepstep as ks
from keepstep.testing import crashproof, effect


@ks.step
async def charge(order, keyed):
    effect("charge", order, key=ks.idempotency_key() if keyed else None)


@ks.workflow
async def pay(order: str, keyed: bool) -> None:
    await charge(order, keyed)


@pytest.fixture
def order():
    return "order-7"


@crashproof
def test_good(order):
    return pay.bind(order, True)


@crashproof(jobs=1)
def test_bad(order):
    return pay.bind(order, False)


def test_fixture(crashtest, order):
    report = crashtest(pay, order, True)
    assert report.ok
    assert len(report.crashes) == 3
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Run pytest where the package is installed, as far as pytest can see."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = project["entry-points"]["pytest11"]
    info = tmp_path / "installed" / "keepstep-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keepstep\nVersion: 0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "test_pay.py").write_text(TESTS)

    def run(*words):
        path = os.pathsep.join([str(ROOT / "src"), str(info.parent)])
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


def test_plugin_passes_good_workflows_and_fails_bad_ones(run_pytest):
    done = run_pytest("-rA", "--crashtest-at-most", "3")
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "PASSED test_pay.py::test_good" in done.stdout
    assert "pay is not crash-proof" in done.stdout
    assert "charge order-7" in done.stdout
    assert "crashtests.py" not in done.stdout  # the report is what one sees, not our own frames
    assert "a sample of" in done.stdout


def test_an_option_that_makes_no_sense_is_refused(run_pytest):
    done = run_pytest("--crashtest-at-most", "0")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "at least 1" in done.stderr
