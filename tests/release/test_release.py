"""What is released: complete, the same from the same commit, and described."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from keepstep.care.archive import FORMAT
from keepstep.records.record import NEWEST_FORMAT
from keepstep.stores.files.entry import LAYOUT
from keepstep.stores.migrations import scripts
from tests.release.build import ROOT, build, exported, git
from tests.release.sbom import sbom

PAGE = ROOT / "docs" / "reference" / "compatibility.md"

in_a_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source distribution has no commits")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    place = tmp_path_factory.mktemp("release")
    return [build(exported(place / name / "source"), place / name / "made") for name in ("a", "b")]


@in_a_checkout
def test_two_builds_of_a_commit_are_the_same(built):
    first, second = built
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


@in_a_checkout
def test_a_wheel_holds_the_package_with_its_data_and_nothing_else(built):
    with zipfile.ZipFile(built[0][1]) as wheel:
        names = set(wheel.namelist())
    shipped = {
        line.removeprefix("src/") for line in git("ls-tree", "-r", "--name-only", "HEAD", "src").decode().split()
    }
    assert {name for name in names if ".dist-info/" not in name} == shipped
    assert {"keepstep/py.typed", "keepstep/workflows/files/schema.json"} <= names


@in_a_checkout
def test_a_source_distribution_holds_what_its_makefile_needs(built):
    with tarfile.open(built[0][0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", ".ci/pythons", "requirements-dev.txt", "requirements-fuzz.txt", "tests/fixtures/make.py"}
    assert needed <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".db")]


# -- the bill of materials ---------------------------------------------------------------------------------------------


def test_a_bill_names_everything_that_is_needed_once():
    bom = sbom("keepstep", b"a wheel")
    assert (bom["bomFormat"], bom["specVersion"], bom["version"]) == ("CycloneDX", "1.6", 1)
    refs = [one["bom-ref"] for one in [bom["metadata"]["component"], *bom["components"]]]
    assert len(refs) == len(set(refs))
    scopes = {one["name"]: one["scope"] for one in bom["components"]}
    assert {name: scopes[name] for name in ("apsw", "click", "msgspec", "rich")} == dict.fromkeys(
        ("apsw", "click", "msgspec", "rich"), "required"
    )
    assert scopes["psycopg"] == "optional"
    assert "pytest" not in scopes
    assert sorted(one["ref"] for one in bom["dependencies"]) == sorted(refs)
    assert {ref for one in bom["dependencies"] for ref in one["dependsOn"]} <= set(refs)
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@[\w.+!]+", ref) for ref in refs)


def test_a_bill_is_the_same_in_the_same_environment():
    script = Path(__file__).parent / "sbom.py"
    words = [sys.executable, script, "keepstep", script]
    first, second = (subprocess.run(words, capture_output=True, check=True).stdout for _ in range(2))
    assert first == second
    assert json.loads(first)["serialNumber"].startswith("urn:uuid:")
    assert str(ROOT).encode() not in first


# -- the policy --------------------------------------------------------------------------------------------------------


def test_the_policy_names_the_newest_schemas_and_formats():
    said = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 2 and re.fullmatch(r"1(–\d+)?", cells[1]):
            said[cells[0]] = int(cells[1].rpartition("–")[2])
    assert said == {
        "SQLite schema": len(scripts("sqlite")),
        "PostgreSQL schema": len(scripts("postgres")),
        "files layout": LAYOUT,
        "record format": NEWEST_FORMAT,
        "archive format": FORMAT,
    }
