"""Links between the pages of the documentation, and from them into the code, lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.test_house import LEVELS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"


def prose(path):
    """The text of a page without its blocks of code and without code between backticks."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(path):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path):
    for link in LINK.findall(prose(path)):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue  # another site
        found = (path.parent / target) if target else path
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            yield link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert list(broken_links(path)) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_tests_exist(path):
    named = re.findall(r"`(tests/[\w/.]+)`", path.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n[a](gone.md) [b](page.md#a-page) [c](#no) [d](https://e.org)\n", encoding="utf-8")
    assert list(broken_links(page)) == ["gone.md", "#no"]


def test_architecture_page_lists_the_rooms_in_their_order():
    rows = re.findall(r"^\| (\d+|–) \| \[`(\w+)`\]", ARCHITECTURE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    written = [{room for at, room in rows if at == str(level)} for level in range(1, len(rows) + 1)]
    real = [{room for room in rooms if room != "__main__"} for rooms in LEVELS]
    assert [rooms for rooms in written if rooms] == [rooms for rooms in real if rooms]
