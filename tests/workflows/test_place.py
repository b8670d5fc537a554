"""Where definitions are written: two of one name in two places are refused, the same place again is not."""

import importlib
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest

from keepstep.errors import DuplicateName
from keepstep.workflows import definition
from keepstep.workflows.source import place_here

SOURCE = "import keepstep as ks\n\n\n@ks.workflow(name='told-apart')\nasync def {function}():\n    pass\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of workflows and imports it; everything is forgotten again afterwards."""
    before = dict(definition.KNOWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield write
    definition.KNOWN.clear()
    definition.KNOWN.update(before)
    for name in made:
        sys.modules.pop(name, None)


def test_two_workflows_of_one_name_in_two_files_are_refused(module):
    module("first_place", SOURCE.format(function="one"))
    with pytest.raises(DuplicateName, match=r"two workflows are named 'told-apart', one in .*first_place\.py and two "):
        module("second_place", SOURCE.format(function="two"))


def test_reload_replaces_a_workflow(module):
    once = module("reloaded_place", SOURCE.format(function="one"))
    again = importlib.reload(once)
    assert definition.KNOWN["told-apart"] is again.one


@pytest.mark.parametrize("file, refused", [(None, False), ("script.py", True)], ids=["notebook", "script"])
def test_changed_cell_of_a_notebook_replaces_its_workflow(module, monkeypatch, file, refused):
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    source = SOURCE.format(function="one")
    exec(compile(source, "cell-1", "exec"), main.__dict__)
    with pytest.raises(DuplicateName) if refused else nullcontext():
        exec(compile(source, "cell-2", "exec"), main.__dict__)
        assert definition.KNOWN["told-apart"] is main.one


def test_a_place_is_that_of_the_code_that_defines(module):
    there = module(
        "plain_place",
        "from keepstep.workflows.source import place_here\n\nhere = place_here('build')\n\n\n"
        "def make():\n    return place_here('build')\n",
    )
    assert (there.here.line, there.here.module, there.here.name) == (3, "plain_place", "build")
    assert there.here.file.endswith("plain_place.py")
    assert not there.here.is_local
    assert (there.make().line, there.make().name) == (7, "make.<locals>.build")
    assert there.make().is_local
    assert place_here("x").module == __name__
