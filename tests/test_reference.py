"""What the reference says is what the code has: names, signatures, options, limits, tables, fields and moves."""

import ast
import asyncio
import importlib
import inspect
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import keepstep
from keepstep import errors, testing
from keepstep.engine.engine import Engine
from keepstep.engine.handle import RunHandle
from keepstep.model import MOVES, Kind
from keepstep.model.event import EVENTS, FIELDS
from keepstep.policies.classify import ErrorClass
from keepstep.policies.retry import CLASS_RETRIES, Retry
from keepstep.ports import ClaimRequest
from keepstep.records.data import KEYS, kinds_of
from keepstep.records.record import Record, StoredError
from keepstep.stores.files.entry import Facts, Head
from keepstep.stores.files.store import FilesStore
from keepstep.stores.open import open_store
from keepstep.stores.postgres.store import PostgresStore
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import record, started
from keepstep.workflows.definition import START_OPTIONS, Step, Workflow
from tests import page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def read(name):
    return (DOCS / name).read_text(encoding="utf-8")


def section(text, heading):
    """What stands under a heading, up to the next of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"there is no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def table(text):
    """The cells of the first table in a text, row by row, without its head; a name alone loses its backticks."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---")) + 1
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([re.sub(r"^`([^`]*)`$", r"\1", cell.strip()) for cell in line.strip("|").split("|")])
    return rows


def first_column(text):
    return [row[0] for row in table(text)]


# -- the API -----------------------------------------------------------------------------------------------------------

HEADINGS = re.findall(r"^### `ks\.(\w+)(\(.*\))?`$", read("reference/api.md"), flags=re.MULTILINE)
SIGNED = [(name, signature) for name, signature in HEADINGS if signature]

#: Decorators take what the definition takes.
DEFINITIONS = {"step": Step, "workflow": Workflow}


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind) for p in found if p.name not in {"self", "fn"}]


def written(signature):
    """The parameters of a heading, read as Python."""
    made = ast.parse(f"def f{signature}: ...").body[0].args
    kinds = inspect.Parameter
    found = [(a.arg, kinds.POSITIONAL_ONLY) for a in made.posonlyargs]
    found += [(a.arg, kinds.POSITIONAL_OR_KEYWORD) for a in made.args]
    found += [(made.vararg.arg, kinds.VAR_POSITIONAL)] if made.vararg else []
    found += [(a.arg, kinds.KEYWORD_ONLY) for a in made.kwonlyargs]
    return found + ([(made.kwarg.arg, kinds.VAR_KEYWORD)] if made.kwarg else [])


def test_every_public_name_is_described_once():
    assert sorted(name for name, _ in HEADINGS) == sorted(keepstep.__all__)


@pytest.mark.parametrize("name, signature", SIGNED, ids=[name for name, _ in SIGNED])
def test_a_signature_is_the_real_one(name, signature):
    assert written(signature) == parameters(DEFINITIONS.get(name) or getattr(keepstep, name))


@pytest.mark.parametrize("name, signature", SIGNED, ids=[name for name, _ in SIGNED])
def test_a_default_is_the_real_one(name, signature):
    real = inspect.signature(DEFINITIONS.get(name) or getattr(keepstep, name)).parameters
    made = ast.parse(f"def f{signature}: ...").body[0].args
    given = dict(zip([a.arg for a in made.args][-len(made.defaults) :], made.defaults, strict=False))
    given |= dict(zip([a.arg for a in made.kwonlyargs], made.kw_defaults, strict=True))
    for parameter, default in given.items():
        if isinstance(default, ast.Constant):
            assert default.value == real[parameter].default, parameter


@pytest.mark.parametrize("heading, cls", [("### `ks.Engine`", Engine), ("### `ks.RunHandle`", RunHandle)])
def test_a_method_is_the_real_one(heading, cls):
    cells = first_column(section(read("reference/api.md"), heading))
    described = dict(re.findall(r"(\w+)(\([^`\n]*\))(?=`|\n|$)", "\n".join(cells)))
    assert len(described) >= len(cells)
    for name, signature in described.items():
        assert [p for p, _ in written(signature)] == [p for p, _ in parameters(getattr(cls, name))], name
    if cls is RunHandle:
        public = {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")}
        assert set(described) == public


def test_every_option_of_a_step_is_described():
    text = read("reference/api.md")
    heading = next(line for line in text.splitlines() if line.startswith("### `ks.step("))
    assert first_column(section(text, heading)) == [name for name, _ in parameters(Step)]


def test_the_names_that_belong_to_start_are_listed():
    text = read("reference/api.md")
    heading = next(line for line in text.splitlines() if line.startswith("### `ks.workflow("))
    sentence = section(text, heading).partition("The parameter names")[2]
    assert set(re.findall(r"`(\w+)`", sentence.partition("belong to")[0])) == START_OPTIONS


#: What `help` shows, and the function whose parameters it must name; decorators take what the definition takes.
HELPED = {
    "ks.step": (keepstep.step, Step),
    "ks.workflow": (keepstep.workflow, Workflow),
    "ks.open": (keepstep.open, Engine),
    **{f"ks.{one}": (getattr(keepstep, one),) * 2 for one in ("Budget", "Dag", "Durability", "Graph", "Hooks", "Keys")},
    **{f"ks.{one}": (getattr(keepstep, one),) * 2 for one in ("Quorum", "Retain", "Retry", "Timeout", "run")},
    **{f"engine.{one}": (getattr(Engine, one),) * 2 for one in ("close", "fork", "get", "list", "signal", "start")},
}


@pytest.mark.parametrize("name", HELPED)
def test_help_names_every_option(name):
    shown, function = HELPED[name]
    anything = {"args", "kwargs", "store_options"}
    text = inspect.getdoc(shown)
    named = [option for option, _ in parameters(function) if option not in anything]
    assert [option for option in named if not re.search(rf"`{option}[`=]", text)] == []


def test_attributes_that_an_engine_shows_are_the_described_ones():
    text = section(read("reference/api.md"), "### `ks.Engine`")
    described = set(
        re.findall(r"^(\w+)\(", "\n".join(cell.strip("`") for cell in first_column(text)), flags=re.MULTILINE)
    )
    described |= set(re.findall(r"`engine\.(\w+)`", text))

    async def shown():
        async with keepstep.open("memory:") as engine:
            return {name for name in dir(engine) if not name.startswith("_")}

    assert asyncio.run(shown()) == described
    with keepstep.open("memory:") as engine:
        assert {name for name in dir(engine) if not name.startswith("_")} == described


# -- errors, policies, configuration -----------------------------------------------------------------------------------


def test_every_error_is_explained():
    ours = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    text = read("reference/errors.md")
    assert {"KeepstepError", *first_column(text)} == ours
    [tree, *_] = [block for block in page.blocks(text) if block.language == "text"]
    assert tree.text.strip() == errors.__doc__.partition("\n\n")[2].strip()


def test_the_fields_of_a_retry_are_the_real_ones():
    rows = table(section(read("reference/policies.md"), "## Retry"))
    real = {name: p.default for name, p in inspect.signature(Retry).parameters.items()}
    assert {name: ast.literal_eval(default) for name, default, _ in rows} == real


def test_the_classes_of_errors_are_the_real_ones():
    rows = table(section(read("reference/policies.md"), "## Classes of errors"))
    real = {str(line.error_class): (line.attempts, line.base_seconds, line.factor) for line in CLASS_RETRIES}
    for name, attempts, base, factor, breaker in rows:
        assert Retry().counts_for_breaker(name) == (breaker == "counts"), name
        if attempts == "never":
            assert name not in real
        else:
            assert real[name] == (int(attempts), float(base), float(factor)), name
    assert {row[0] for row in rows} == {str(one) for one in ErrorClass}


@pytest.mark.parametrize(
    "heading, function",
    [
        ("## Options of `ks.open`", Engine),
        ("## Options of the SQLite store", SQLiteStore),
        ("## Options of the PostgreSQL store", PostgresStore),
        ("## Options of the files store", FilesStore),
    ],
)
def test_options_and_their_defaults_are_the_real_ones(heading, function):
    real = {name: p.default for name, p in inspect.signature(function).parameters.items() if p.kind != p.VAR_KEYWORD}
    if function is not Engine:
        real = {name: default for name, default in real.items() if name not in {"path", "url", "clock", "disk"}}
    rows = table(section(read("reference/configuration.md"), heading))
    assert {name: default for name, default, _ in rows} == {name: str(default) for name, default in real.items()}


def test_limits_are_the_real_ones():
    rows = table(section(read("reference/configuration.md"), "## Limits"))
    assert len(rows) > 20
    for constant, value, why in rows:
        module, _, name = constant.rpartition(".")
        assert getattr(importlib.import_module(f"keepstep.{module}"), name) == ast.literal_eval(value), constant
        assert why, constant


def test_the_options_of_a_crash_test_are_the_real_ones():
    text = read("reference/testing.md")
    [signature] = re.findall(r"^### `crashtest(\(.*\))`$", text, flags=re.MULTILINE)
    assert written(signature) == parameters(testing.crashtest)
    options = [name for name, kind in parameters(testing.crashtest) if kind is inspect.Parameter.KEYWORD_ONLY]
    assert first_column(section(text, f"### `crashtest{signature}`")) == options
    described = set(re.findall(r"^### `(\w+)", text, flags=re.MULTILINE))
    assert {"Ask", "Report", "crashproof", "crashtest", "effect"} <= described <= set(testing.__all__)


@pytest.mark.parametrize("name", ["run", "world", "in_virtual_time", "stub", "replay"])
def test_a_helper_for_tests_is_the_real_one(name):
    [signature] = re.findall(rf"^### `{name}(\(.*\))`$", read("reference/testing.md"), flags=re.MULTILINE)
    assert written(signature) == parameters(getattr(testing, name))


@pytest.mark.parametrize("name", ["World", "Events", "History"])
def test_a_class_for_tests_is_the_real_one(name):
    cls = getattr(testing, name)
    cells = "\n".join(first_column(section(read("reference/testing.md"), f"### `{name}`")))
    described = dict(re.findall(r"(\w+)(\([^`\n]*\))(?=`|\n|$)", cells))
    own = {key for key, value in vars(cls).items() if not key.startswith("_") and key not in {"close", "observe"}}
    own -= set(getattr(cls, "__dataclass_fields__", ()))
    assert own <= set(described) | set(re.findall(r"^(\w+)$", cells, flags=re.MULTILINE))
    for method in own & set(described):
        assert [p for p, _ in written(described[method])] == [p for p, _ in parameters(getattr(cls, method))], method


def test_the_findings_of_a_crash_test_are_explained():
    source = (ROOT / "src/keepstep/testing/crashtests/findings.py").read_text(encoding="utf-8")
    source += (ROOT / "src/keepstep/testing/crashtests/crashtest.py").read_text(encoding="utf-8")
    codes = set(re.findall(r'(?:ERROR|WARNING|NOTE|severity),\s+"([a-z-]+)"', source))
    assert len(codes) > 12
    page_text = read("how-to/crash-test.md")
    assert {code for code in codes if f"`{code}`" not in page_text} == set()


# -- the data ----------------------------------------------------------------------------------------------------------


def test_every_table_and_column_is_described(tmp_path):
    open_store(tmp_path / "runs.db").close()
    database = sqlite3.connect(tmp_path / "runs.db")
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    tables = {name: [row[1] for row in database.execute(f"PRAGMA table_info({name})")] for name in names}
    database.close()
    tables.pop("sqlite_sequence", None)
    text = read("data.md")
    described = re.findall(r"^### (keepstep_\w+)$", text, flags=re.MULTILINE)
    assert {name: first_column(section(text, f"### {name}")) for name in described} == tables


def test_the_files_beside_the_database_are_described(tmp_path):
    store = open_store(tmp_path / "runs.db")
    made = {found.name + "/" * found.is_dir() for found in tmp_path.iterdir()}
    store.close()
    described = set(re.findall(r"`(runs\.db[^`]*)`", section(read("data.md"), "## Files")))
    assert made <= described


def test_the_files_of_a_files_store_are_described(tmp_path):
    store = FilesStore(tmp_path / "runs")
    writer = started(store, "digest-42")
    for _ in range(15):
        writer.write(record("digest-42"), record("digest-42", value=b'"' + b"x" * 200_000 + b'"'))
    store.claim_runs(ClaimRequest("w1"))
    text = section(read("data.md"), "## The files store")
    stands_for = {"WORKER": "[^/]+", "WORD": r"\w+", "RUN": "[^/]+", "NAME": r"[\w\-]+", "AB": "..", "N": r"\d+"}
    patterns = [
        re.sub("WORKER|WORD|RUN|NAME|AB|N", lambda word: stands_for[word[0]], re.escape(name))
        for cell in re.findall(r"^\| (`[^|]+) \|", text, flags=re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", cell)
    ]
    for found in (tmp_path / "runs").rglob("*"):
        name = str(found.relative_to(tmp_path / "runs"))
        assert found.is_dir() or any(re.fullmatch(one, name) for one in patterns), name
    store.close()


@pytest.mark.parametrize("heading, kind", [("### An entry's head", Head), ("### What creates a run", Facts)])
def test_every_field_of_an_entry_is_described(heading, kind):
    assert first_column(section(read("data.md"), heading)) == list(kind.__struct_fields__)


def test_every_field_of_a_record_is_described():
    rows = table(section(read("data.md"), "## A record"))
    assert [row[0] for row in rows] == list(Record.__struct_fields__)
    error = next(says for name, says in rows if name == "error")
    assert re.findall(r"`(\w+)`", error) == list(StoredError.__struct_fields__)


def test_every_kind_is_described():
    assert first_column(section(read("data.md"), "### Kinds")) == [kind.value for kind in Kind]


def test_every_key_of_data_is_described():
    rows = table(section(read("data.md"), "### Keys of data"))
    kinds = {name: ", ".join(kind.value for kind in Kind if kind.value in kinds_of(name)) for name in KEYS}
    assert rows == [[name, kinds[name], "yes" if key.hidden else "", key.about] for name, key in KEYS.items()]


def test_every_event_is_described():
    rows = table(section(read("reference/events.md"), "## Names"))
    fields = {name: ", ".join(f"`{one}`" for one in spec.data) for name, spec in EVENTS.items()}
    fields |= {name: one.strip("`") for name, one in fields.items() if one.count("`") == 2}  # as `table` gives them
    assert rows == [[name, spec.level, fields[name], spec.about] for name, spec in EVENTS.items()]


def test_every_field_of_an_event_is_described():
    rows = table(section(read("reference/events.md"), "## Fields of data"))
    assert rows == [[name, about] for name, about in FIELDS.items()]


def test_the_status_moves_are_the_real_ones():
    rows = table(section(read("data.md"), "## Status"))
    assert {(old, new): who for old, new, who in rows} == {(str(a), str(b)): who for (a, b), who in MOVES.items()}
    assert len(rows) == len(MOVES)


# -- what pages show and point to ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [ROOT / "README.md", DOCS / "tutorial.md", DOCS / "data.md"], ids=lambda p: p.name)
def test_commands_print_what_the_page_shows(path, tmp_path):
    """Each command prints the lines that stand under it; what it says on standard error is not shown."""
    text = path.read_text(encoding="utf-8")
    shown = []
    for block in page.blocks(text):
        if block.runs and block.language == "console":
            shown += [line for line in block.text.splitlines() if not line.startswith("$ ")]
    done = subprocess.run(
        [sys.executable, page.__file__, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [without_times(line) for line in done.stdout.splitlines()] == [without_times(line) for line in shown]


def without_times(line):
    """A line in which how long things took, and the room made for it, does not count."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)? m?s( ago)?\b|\bnow\b", "<time>", line)).strip()


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target
    for named in re.findall(r"`((?:tests|src|examples)/[\w./]*)`", text):
        assert (ROOT / named).exists(), named


def test_the_readme_is_short_and_holds_the_idea():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert "Starting and recovering are the\n> same act: take the lease, load the checkpoints, call the code." in text


def test_examples_are_short():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 80, path.name
