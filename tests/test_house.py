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
from pathlib import Path
from types import ModuleType

import pytest

import keepstep

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGE = "keepstep"

#: From the ground up. A part may import what stands below it; parts of one line do not know of each other.
LEVELS = (
    {"errors"},
    {"model"},
    {"policies"},
    {"ports"},
    {"values"},
    {"workflows", "stores", "executors", "agents", "observers"},
    {"engine"},
    {PACKAGE},  # the public API itself
    {"cli", "web"},
    {"__main__"},
)
LEVEL = {part: number for number, parts in enumerate(LEVELS) for part in parts}
#: Shipped for others to test with. It may use everything, and only these may use it, inside a function or for types.
TESTING = "testing"
USES_TESTING = {"keepstep.cli.crashtest"}

#: What would let a policy sleep, log or look at a clock.
#: Stores that need a package which only an extra installs; they are loaded when the scheme of a URL names them.
OF_EXTRAS = {"psycopg": "keepstep.stores.postgres"}
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
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}


def part_of(module: str) -> str:
    """The top-level part that a module of the package belongs to."""
    return module.split(".")[1] if "." in module else module


def imports_of(name: str) -> Iterator[Import]:
    """Every import that a module makes, wherever it is written."""
    is_package = MODULES[name].name == "__init__.py"
    waiting: list[tuple[ast.AST, bool, bool]] = [(TREES[name], False, False)]
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


IMPORTS = [found for name in MODULES for found in imports_of(name)]
OURS = [found for found in IMPORTS if found.target.split(".")[0] == PACKAGE]
FOREIGN = [found for found in IMPORTS if found.target.split(".")[0] not in {PACKAGE, *sys.stdlib_module_names}]


# -- who may import whom -----------------------------------------------------------------------------------------------


def test_the_imports_are_seen():
    """Or the tests below would hold for want of anything to look at."""
    assert any(found.source == "keepstep.ports" and found.target == "keepstep.model" for found in OURS)
    assert any(found.source == "keepstep.errors" and found.typing for found in OURS)
    assert any(found.target == "msgspec" for found in FOREIGN)


def test_every_part_has_its_place():
    assert {part_of(name) for name in MODULES} - {TESTING} <= set(LEVEL), "give the new part its level in LEVELS"


def test_imports_point_one_way():
    wrong = [
        found
        for found in OURS
        if not found.typing
        and part_of(found.source) not in {TESTING, part_of(found.target)}
        and part_of(found.target) != TESTING
        and LEVEL[part_of(found.target)] >= LEVEL[part_of(found.source)]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_nothing_imports_testing():
    wrong = [
        found
        for found in OURS
        if part_of(found.target) == TESTING
        and part_of(found.source) != TESTING
        and not (found.source in USES_TESTING and (found.lazy or found.typing))
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_module_needs_itself_to_be_loaded():
    needs: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in OURS:
        if not found.lazy and not found.typing:
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


@pytest.mark.parametrize("part", ["errors", "model", "policies"])
def test_the_ground_floor_needs_only_the_standard_library(part):
    assert not [str(found) for found in FOREIGN if part_of(found.source) == part]


def test_policies_are_pure():
    wrong = [
        str(found)
        for found in IMPORTS
        if part_of(found.source) == "policies" and found.target.split(".")[0] in IMPURE and not found.typing
    ]
    assert not wrong


def test_what_is_imported_on_loading_is_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    optional = {"web", TESTING}  # whoever imports these has installed what they need
    wrong = [
        str(found)
        for found in FOREIGN
        if not (found.lazy or found.typing)
        and part_of(found.source) not in optional
        and found.target.split(".")[0] not in core
        and not found.source.startswith(OF_EXTRAS.get(found.target.split(".")[0], "nobody"))
    ]
    assert not wrong


def test_what_needs_an_extra_is_loaded_only_by_those_who_ask_for_it():
    wrong = [
        str(found)
        for found in IMPORTS
        for store in OF_EXTRAS.values()
        if found.target.startswith(store) and not found.source.startswith(store) and not (found.lazy or found.typing)
    ]
    assert not wrong


# -- what is public ----------------------------------------------------------------------------------------------------


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


def test_help_loads_no_command():
    loaded = loaded_by("from keepstep.cli import main; main(['--help'])")
    ours = {name for name in loaded if name.startswith("keepstep.")}
    assert ours == {"keepstep.cli", "keepstep.cli.exits", "keepstep.cli.frame", "keepstep.errors"}
    assert {"asyncio", "rich", "apsw", "msgspec"} & loaded == set()


def test_a_name_is_loaded_from_where_type_checkers_see_it():
    seen = {
        (alias.name, node.module)
        for block in TREES[PACKAGE].body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "_TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(keepstep._HOME.items())
    assert {name for name, _ in seen} == set(keepstep.__all__) - {"__version__"}


def test_parts_of_the_package_need_no_import_of_their_own():
    assert {part_of(name) for name in MODULES} - {PACKAGE, "__main__"} == keepstep._PARTS
    found = "import keepstep; print(keepstep.errors.LeaseLost, keepstep.testing, keepstep.step)"
    assert {"keepstep.errors", "keepstep.testing"} <= loaded_by(found)


def test_all_names_are_listed_and_no_other_is_found():
    assert set(keepstep.__all__) | keepstep._PARTS <= set(dir(keepstep))
    with pytest.raises(AttributeError, match="no attribute 'stepp'"):
        _ = keepstep.stepp
    with pytest.raises(ImportError, match="stepp"):
        from keepstep import stepp  # noqa: F401


# -- what every file says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_a_module_starts_with_one_sentence(name):
    docstring = ast.get_docstring(TREES[name])
    assert docstring, "say in one sentence what lives there"
    first = docstring.splitlines()[0]
    assert re.fullmatch(r"[A-Z`].*\.", first), f"not a sentence on one line: {first}"
    assert not re.search(r"[.!?] [A-Z]", first), f"more than one sentence: {first}"


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


def test_what_is_forbidden_would_be_found():
    for bad in ("see py" + "pi.org/simple", "open('/ro" + "ot/x')", "cd /wo" + "rk/main", "/ho" + "me/ann/x"):
        assert FORBIDDEN.search(bad)
    for good in ("framework/main", "the /work", "a/root/b", "http://x/work/y"):
        assert not FORBIDDEN.search(good)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
