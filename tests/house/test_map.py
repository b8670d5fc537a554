"""The map of the modules is complete and up to date."""

from pathlib import Path

from tests.house import map as house_map


def test_map_is_up_to_date():
    written = house_map.PAGE.read_text(encoding="utf-8")
    assert written == house_map.page(), "run `python -m tests.house.map --write`"


def test_every_link_of_the_map_leads_to_a_module():
    linked = {
        (house_map.PAGE.parent / line.partition("](")[2].partition(")")[0]).resolve()
        for line in house_map.page().splitlines()
        if line.startswith("| [")
    }
    assert linked == {path.resolve() for path in house_map.SOURCE.rglob("*.py")}


def test_changed_docstring_changes_the_map(tmp_path: Path):
    (tmp_path / "room").mkdir()
    module = tmp_path / "room" / "part.py"
    module.write_text('"""Counts things.\n\nMore."""\n', encoding="utf-8")
    before = house_map.page(tmp_path)
    assert "| [part](../../src/keepstep/room/part.py) | Counts things. |" in before
    module.write_text('"""Counts other things."""\n', encoding="utf-8")
    assert house_map.page(tmp_path) != before
