"""The house rules: which part may import which, what is public, what every file must and must not say."""

from __future__ import annotations
import __future__

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import keepstep
from keepstep.model import Kind, checkpoint
from keepstep.ports import OptionalStore, Store

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGE = "keepstep"

#: From the ground up. A part may import what stands below it; parts of one line do not know of each other.
LEVELS = (
    {"model"},
    {"errors"},
    {"checks"},
    {"policies"},
    {"ports"},
    {"values"},
    {"records"},
    {"workflows", "stores", "executors", "observers"},
    {"kernel"},
    {"history", "drawing", "bodies"},
    {"care"},
    {"engine"},
    {"agents"},
    {"views"},
    {PACKAGE},  # the public API itself
    {"web"},
    {"mcp"},
    {"cli"},
    {"__main__"},
)
LEVEL = {part: number for number, parts in enumerate(LEVELS) for part in parts}
#: Shipped for others to test with. It may use everything, and only these may use it, inside a function or for types.
TESTING = "testing"
USES_TESTING = {"keepstep.cli.crashtest"}

#: Modules that need a package which only an extra installs; they are loaded when a URL or an executor names them.
OF_EXTRAS = {
    "psycopg": "keepstep.stores.postgres",
    "opentelemetry": "keepstep.observers.opentelemetry",
    "distributed": "keepstep.bodies.dask",
    "tornado": "keepstep.bodies.dask",  # comes with distributed
    "ray": "keepstep.bodies.ray",
}
#: Modules of agents that need no framework. Every other one is for a framework, and users load it themselves.
OF_NO_FRAMEWORK = {f"keepstep.agents{one}" for one in ("", ".calls", ".contract", ".threads")}
#: What would let a policy sleep, log or look at a clock.
IMPURE = {"time", "logging", "asyncio", "random", "secrets", "threading", "os", "subprocess"}


@dataclass(frozen=True)
class Import:
    source: str
    target: str
    line: int
    lazy: bool  # made when a function is called, not when the module is loaded
    typing: bool  # seen only by type checkers

    def __str__(self):
        return f"{self.source}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((SRC / PACKAGE).rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax of every module, read when a test asks, because every process of a test run loads this file."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}


def part_of(module: str) -> str:
    """The top-level part that a module of the package belongs to."""
    return module.split(".")[1] if "." in module else module


def imports_of(name: str) -> Iterator[Import]:
    """Every import that a module makes, wherever it is written."""
    is_package = MODULES[name].name == "__init__.py"
    waiting: list[tuple[ast.AST, bool, bool]] = [(trees()[name], False, False)]
    while waiting:
        node, lazy, typing = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets_of(node, name, is_package=is_package):
                yield Import(name, target, node.lineno, lazy, typing)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend((child, lazy, True) for child in node.body)
            waiting.extend((child, lazy, typing) for child in node.orelse)
        else:
            waiting.extend((child, lazy, typing) for child in ast.iter_child_nodes(node))


def targets_of(node: ast.Import | ast.ImportFrom, name: str, *, is_package: bool) -> Iterator[str]:
    """The modules that an import statement names, submodules of ours as themselves."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        above = name.split(".")[: len(name.split(".")) - node.level + is_package]
        base = ".".join([*above, base] if base else above)
    for alias in node.names:
        full = f"{base}.{alias.name}"
        yield full if full in MODULES else base


@cache
def imports() -> list[Import]:
    """All imports of all modules."""
    return [found for name in MODULES for found in imports_of(name)]


@cache
def ours() -> list[Import]:
    """The imports of the package's own modules."""
    return [found for found in imports() if found.target.split(".")[0] == PACKAGE]


@cache
def foreign() -> list[Import]:
    """The imports of other packages than the standard library."""
    return [found for found in imports() if found.target.split(".")[0] not in {PACKAGE, *sys.stdlib_module_names}]


# -- who may import whom -----------------------------------------------------------------------------------------------


def test_the_imports_are_seen():
    """Or the tests below would hold for want of anything to look at."""
    assert any(found.source == "keepstep.ports" and found.target == "keepstep.model" for found in ours())
    assert any(found.source == "keepstep.errors" and found.typing for found in ours())
    assert any(found.target == "msgspec" for found in foreign())


def test_every_part_has_its_place():
    assert {part_of(name) for name in MODULES} - {TESTING} <= set(LEVEL), "give the new part its level in LEVELS"


def test_imports_point_one_way():
    wrong = [
        found
        for found in ours()
        if part_of(found.source) not in {TESTING, part_of(found.target)}
        and part_of(found.target) != TESTING
        and LEVEL[part_of(found.target)] >= LEVEL[part_of(found.source)]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_nothing_imports_testing():
    wrong = [
        found
        for found in ours()
        if part_of(found.target) == TESTING
        and part_of(found.source) != TESTING
        and not (found.source in USES_TESTING and (found.lazy or found.typing))
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_module_needs_one_that_needs_it():
    """Imports for types and imports inside functions count: whoever reads the module has to know them, too."""
    needs: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in ours():
        if found.source != found.target:
            needs[found.source].add(found.target)
    assert not cycle_in(needs), " → ".join(cycle_in(needs))


def test_a_cycle_would_be_found():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def cycle_in(needs: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for needed in sorted(needs.get(name, ())):
                found = visit(needed, [*path, name])
                if found:
                    return found
            done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in sorted(needs))), [])


# -- who writes the state of a run -------------------------------------------------------------------------------------

#: How often modules beside the driver of a run write its attributes, or change what they hold. It may only fall.
OUTSIDE_WRITES = 3
#: The parts of a run: the class that alone may write the fields of each, and where it is.
PARTS = {
    "stop": ("keepstep.kernel.stop", "Stop"),
    "thread": ("keepstep.kernel.code_thread", "CodeThreads"),
    "children": ("keepstep.kernel.child_runs", "ChildRuns"),
    "inbox": ("keepstep.kernel.inbox", "Inbox"),
    "spent": ("keepstep.kernel.ledger", "Spent"),
}
#: Methods that change a list, a dictionary, a set or a deque.
CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert"),
    *("pop", "popitem", "popleft", "remove", "setdefault", "update"),
}


def attributes_of(module: str, name: str) -> set[str]:
    """The attributes that a class gives itself when it is made."""
    [made] = [node for node in ast.walk(trees()[module]) if isinstance(node, ast.ClassDef) and node.name == name]
    [init] = [node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def written_in(tree: ast.AST) -> Iterator[tuple[int, ast.Attribute]]:
    """Every attribute that is assigned, deleted, or changed in place, with its line."""
    for node in ast.walk(tree):
        changed = node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            changed = node.func.value
        elif not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        elif isinstance(node, ast.Subscript):
            changed = node.value
        if isinstance(changed, ast.Attribute):
            yield node.lineno, changed


def is_run(node: ast.AST) -> bool:
    """Whether an expression is the driver of a run, by the names that it goes by."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in {"run", "_run", "context"}


def outside_writes() -> list[str]:
    own = attributes_of("keepstep.kernel.driver", "RunDriver")
    return [
        f"{name}:{line} {ast.unparse(written)}"
        for name, tree in trees().items()
        if name != "keepstep.kernel.driver"
        for line, written in written_in(tree)
        if written.attr in own
        and is_run(written.value)
        and not (written.attr in PARTS and isinstance(written.ctx, ast.Load))  # a part is asked for a move
    ]


def test_state_of_a_run_is_written_by_its_driver_or_by_a_known_number_of_others():
    found = outside_writes()
    assert len(found) <= OUTSIDE_WRITES, "\n".join(found)
    assert len(found) == OUTSIDE_WRITES, f"well done: lower OUTSIDE_WRITES to {len(found)}"


@pytest.mark.parametrize("part", PARTS)
def test_part_of_a_run_is_written_by_itself_alone(part):
    home, name = PARTS[part]
    own = attributes_of(home, name)
    wrong = [
        f"{module}:{line} {ast.unparse(written)}"
        for module, tree in trees().items()
        for line, written in written_in(tree)
        if written.attr in own and isinstance(written.value, ast.Attribute) and written.value.attr == part
    ]
    assert wrong == []


def test_writes_would_be_found():
    text = "run.a = 1; del run.b; run.c.append(2); run.d[3] = 4; run.e += 1; run.f.g = 5; x = run.h; run.i()"
    found = [ast.unparse(written) for _, written in written_in(ast.parse(text))]
    assert sorted(found) == ["run.a", "run.b", "run.c", "run.d", "run.e", "run.f.g"]


@pytest.mark.parametrize("part", ["model", "errors", "checks", "policies"])
def test_the_ground_floor_needs_only_the_standard_library(part):
    assert not [str(found) for found in foreign() if part_of(found.source) == part]


def test_policies_are_pure():
    wrong = [
        str(found)
        for found in imports()
        if part_of(found.source) == "policies" and found.target.split(".")[0] in IMPURE and not found.typing
    ]
    assert not wrong


def is_for_a_framework(module):
    return module.startswith("keepstep.agents.") and module not in OF_NO_FRAMEWORK


def test_every_import_on_loading_is_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    optional = {"web", "mcp", TESTING}  # whoever imports these has installed what they need
    wrong = [
        str(found)
        for found in foreign()
        if not (found.lazy or found.typing)
        and part_of(found.source) not in optional
        and found.target.split(".")[0] not in core
        and not found.source.startswith(OF_EXTRAS.get(found.target.split(".")[0], "nobody"))
        and not is_for_a_framework(found.source)
    ]
    assert not wrong


def test_modules_that_need_an_extra_are_loaded_on_demand():
    wrong = [
        str(found)
        for found in imports()
        for store in OF_EXTRAS.values()
        if found.target.startswith(store) and not found.source.startswith(store) and not (found.lazy or found.typing)
    ]
    assert not wrong
    assert not [
        str(found)
        for found in imports()
        if is_for_a_framework(found.target) and found.target.split(".")[:3] != found.source.split(".")[:3]
    ]


# -- what a kind of record means ---------------------------------------------------------------------------------------

#: What each kind means, and which keys its data has.
TABLES_OF_KINDS = {"keepstep.model.checkpoint", "keepstep.records.data"}
#: One query for records of two kinds, and one line of the command line about two kinds. It may only fall.
LOCAL_SETS_OF_KINDS = 2


def sets_of_kinds(tree: ast.AST) -> list[int]:
    """The lines on which two kinds of record or more are put together."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Set | ast.Tuple | ast.List) and sum(map(is_kind, node.elts)) > 1
    ]


def is_kind(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in ONLY_KINDS
    if isinstance(node, ast.Attribute) and node.attr == "value":
        node = node.value
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Kind"


#: Kinds by their texts, without the words that name other things, too.
ONLY_KINDS = {kind.value for kind in Kind} - {"barrier", "child", "decision", "error", "published", "reply"}


def test_the_meaning_of_a_kind_is_in_one_table():
    """A set of kinds elsewhere is a meaning without a name: give `Trait` a member and the kinds their trait."""
    found = [
        f"{name}:{line}"
        for name, tree in trees().items()
        if name not in TABLES_OF_KINDS and part_of(name) != TESTING
        for line in sets_of_kinds(tree)
    ]
    assert len(found) == LOCAL_SETS_OF_KINDS, "\n".join(found)


def test_a_set_of_kinds_would_be_found():
    for bad in ("frozenset({Kind.TIMER, Kind.SIGNAL})", "(Kind.TIMER.value, Kind.CHILD.value)", '["timer", "patch"]'):
        assert sets_of_kinds(ast.parse(bad))
    for good in (
        "(Kind.TIMER.value, Outcome.FAILURE)",
        "one(Kind.TIMER, Kind.SIGNAL)",
        '("child", "error", "barrier")',
    ):
        assert not sets_of_kinds(ast.parse(good))


def test_every_kind_has_a_row_and_every_trait_a_set_of_kinds():
    assert list(checkpoint.TRAITS) == list(Kind)
    for trait in checkpoint.Trait:
        kinds = getattr(checkpoint, str(trait.name))
        assert kinds == {kind for kind, traits in checkpoint.TRAITS.items() if trait in traits}
        assert kinds, f"no kind is {trait.name}"


# -- what is public ----------------------------------------------------------------------------------------------------


#: A question for a named attribute of a store.
ASKS_STORE = re.compile(r"""(?:get|has)attr\([^,\n]*\b(?:store|inner)\b[^,\n]*, ["'](\w+)""")


def test_optional_methods_of_a_store_are_asked_for_in_one_place():
    found = {
        str(path.relative_to(SRC)): ASKS_STORE.findall(path.read_text(encoding="utf-8"))
        for path in SRC.rglob("*.py")
        if path != SRC / PACKAGE / "ports.py"
    }
    assert {path: names for path, names in found.items() if names} == {}, "use ports.optional"
    assert ASKS_STORE.findall('ask = getattr(below(self.host.store), "rewrite", None)') == ["rewrite"]


def test_every_optional_method_is_one_that_a_store_has():
    from keepstep.stores.files.store import FilesStore
    from keepstep.stores.postgres.store import PostgresStore
    from keepstep.stores.sqlite.store import SQLiteStore

    named = {name for name in vars(OptionalStore) if not name.startswith("_")} | {"keeps_earlier_keys"}
    assert {
        name for name in named if any(hasattr(one, name) for one in (FilesStore, PostgresStore, SQLiteStore))
    } == named
    assert not [name for name in named if hasattr(Store, name)]


def test_all_is_sorted_and_without_doubles():
    def kind(name: str) -> int:  # constants, then types, then the rest, as the linter sorts them
        return 0 if name.isupper() else 1 if name[0].isupper() else 2

    assert list(keepstep.__all__) == sorted(set(keepstep.__all__), key=lambda name: (kind(name), name))


def test_every_public_name_is_there():
    assert [name for name in keepstep.__all__ if not hasattr(keepstep, name)] == []


def test_nothing_else_looks_public():
    def expected(name: str, value: object) -> bool:
        submodule = isinstance(value, ModuleType) and value.__name__ == f"{PACKAGE}.{name}"
        rewritten = name.startswith("@")  # pytest writes these into a package that brings a plugin
        return submodule or rewritten or isinstance(value, __future__._Feature)

    found = {name for name, value in vars(keepstep).items() if not name.startswith("_") and not expected(name, value)}
    assert found - set(keepstep.__all__) == set()


def test_every_public_name_states_its_promise():
    def documented(value: object) -> bool:
        return bool(inspect.getdoc(value)) if inspect.isclass(value) or inspect.isroutine(value) else True

    assert [name for name in keepstep.__all__ if not documented(getattr(keepstep, name))] == []


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter loads for a piece of code, beyond those that it always has."""

    def modules(said: str) -> set[str]:
        script = f"import sys\n{said}\nprint(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        return set(done.stdout.splitlines()[-1].split())

    return modules(code) - modules("")


def test_the_package_loads_without_what_is_slow_or_optional():
    slow = {"rich", "click", "pydantic", "uvloop", "psutil", "importlib.metadata"}
    everything = loaded_by("from keepstep import *")
    assert "keepstep.engine.engine" in everything
    assert slow & everything == set()


def test_importing_the_package_loads_nothing_of_it():
    assert {name for name in loaded_by("import keepstep") if part_of(name) in LEVEL} == {"keepstep"}


def test_opening_a_store_loads_only_what_driving_a_run_needs(tmp_path):
    opening = (
        f"import asyncio, keepstep\nasync def main():\n    async with keepstep.open({str(tmp_path / 'x.db')!r}): pass"
    )
    everything = loaded_by(f"{opening}\nasyncio.run(main())")
    assert not everything & {"json", "difflib"}
    loaded = {name for name in everything if name.startswith(f"{PACKAGE}.")}
    assert "keepstep.stores.sqlite.store" in loaded
    rare = {"care", "cli", "drawing", "history", "testing", "views"}
    series = {"keepstep.history", "keepstep.history.series"}  # a handle follows the runs of a series
    assert {name for name in loaded if part_of(name) in rare} == series
    others = ("keepstep.stores.postgres", "keepstep.stores.files", "keepstep.stores.memory", "keepstep.workflows.files")
    assert {name for name in loaded if name.startswith(others)} == set()
    assert not loaded & {"keepstep.stores.sqlite.check", "keepstep.policies.when", "keepstep.policies.quorum"}


def test_help_loads_no_command():
    loaded = loaded_by("from keepstep.cli import main; main(['--help'])")
    ours = {name for name in loaded if name.startswith("keepstep.")}
    assert ours == {"keepstep.cli", "keepstep.cli.errors", "keepstep.cli.settings", "keepstep.errors"}
    assert {"asyncio", "rich", "apsw", "msgspec"} & loaded == set()


def test_a_name_is_loaded_from_where_type_checkers_see_it():
    seen = {
        (alias.name, node.module)
        for block in trees()[PACKAGE].body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "_TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(keepstep._HOME.items())
    assert {name for name, _ in seen} == set(keepstep.__all__) - {"__version__"}


def test_parts_of_the_package_need_no_import_of_their_own():
    assert {part_of(name) for name in MODULES} - {PACKAGE, "__main__"} == keepstep._PARTS
    found = "import keepstep; print(keepstep.errors.StoreFull, keepstep.testing, keepstep.step)"
    assert {"keepstep.errors", "keepstep.testing"} <= loaded_by(found)


def test_all_public_names_are_listed_and_no_other_is_found():
    assert set(dir(keepstep)) == set(keepstep.__all__)
    with pytest.raises(AttributeError, match="no attribute 'stepp'"):
        _ = keepstep.stepp
    with pytest.raises(ImportError, match="stepp"):
        from keepstep import stepp  # noqa: F401


# -- what every file says ----------------------------------------------------------------------------------------------


def test_every_module_starts_with_one_sentence():
    wrong = []
    for name, tree in trees().items():
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        if not first:
            wrong.append(f"{name}: say in one sentence what lives there")
        elif not re.fullmatch(r"[A-Z`].*\.", first):
            wrong.append(f"{name}: not a sentence on one line: {first}")
        elif re.search(r"[.!?] [A-Z]", first):
            wrong.append(f"{name}: more than one sentence: {first}")
    assert not wrong, "\n".join(wrong)


#: Written in pieces, so that this file does not hold what it looks for.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"py" + r"pi\.org",
            r"python" + r"hosted",
            r"npm" + r"js\.",
            r"deb\." + r"debian",
            r"crates\." + r"io",
            r"(?<![\w.:/-])/(?:work|root|farm|home/\w+|Users/\w+)" + r"/",
        )
    )
)
#: Never looked into: made by tools, not written by anyone.
MADE = re.compile(r"\.git|\.venv.*|\..*_cache|\.hypothesis|__pycache__|build|dist|.*\.egg-info|node_modules")


def written_files() -> Iterator[Path]:
    waiting = [ROOT]
    while waiting:
        for path in waiting.pop().iterdir():
            if MADE.fullmatch(path.name) or path.is_symlink():
                continue
            if path.is_dir():
                waiting.append(path)
            elif path.stat().st_size < 2_000_000:
                yield path


def test_no_file_names_a_machine_or_a_registry():
    hits = []
    for path in written_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        for number, line in enumerate(text.splitlines(), 1):
            if FORBIDDEN.search(line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert hits == []


def test_forbidden_names_would_be_found():
    for bad in ("see py" + "pi.org/simple", "open('/ro" + "ot/x')", "cd /wo" + "rk/main", "/ho" + "me/ann/x"):
        assert FORBIDDEN.search(bad)
    for good in ("framework/main", "the /work", "a/root/b", "http://x/work/y"):
        assert not FORBIDDEN.search(good)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_error_is_raised_somewhere():
    """An error that nothing raises promises something that does not exist."""
    tree = trees()[f"{PACKAGE}.errors"]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    used = {
        node.id if isinstance(node, ast.Name) else node.attr
        for name, other in trees().items()
        if name not in (f"{PACKAGE}.errors", f"{PACKAGE}.policies.classify", PACKAGE)
        for node in ast.walk(other)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    by_phase = {error.__name__ for error in keepstep.errors.RECOVERY_PHASES.values()}
    for_users = {"AgentRefused", "Permanent", "RetryAfter"}
    unused = {node.name for node in classes} - used - bases - by_phase - for_users
    assert not unused, f"nothing raises {unused}: add an error with the code that raises it"
