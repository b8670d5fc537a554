"""The source, the changelog, the glossary and the most read pages keep to the rules of docs/contributing/writing.md."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages that hold to the length of a sentence.
PLAIN = [
    "CONTRIBUTING.md",
    "README.md",
    "docs/coming-from.md",
    "docs/contributing/change.md",
    "docs/contributing/decisions.md",
    "docs/contributing/writing.md",
    "docs/explanation/architecture.md",
    "docs/explanation/faults.md",
    "docs/explanation/guarantees.md",
    "docs/explanation/simulation.md",
    "docs/how-to/budgets.md",
    "docs/how-to/dags.md",
    "docs/how-to/django.md",
    "docs/how-to/docker.md",
    "docs/how-to/draw-a-workflow.md",
    "docs/how-to/exactly-once.md",
    "docs/how-to/fastapi.md",
    "docs/how-to/graphs.md",
    "docs/how-to/hooks.md",
    "docs/how-to/jupyter.md",
    "docs/how-to/keep-checkpoints-in-files.md",
    "docs/how-to/keep-secrets-out.md",
    "docs/how-to/kubernetes.md",
    "docs/how-to/long-loops.md",
    "docs/how-to/look-after-a-store.md",
    "docs/how-to/observe.md",
    "docs/how-to/postgresql.md",
    "docs/how-to/readiness.md",
    "docs/how-to/retries-and-timeouts.md",
    "docs/how-to/rewind-fork-compare.md",
    "docs/how-to/systemd.md",
    "docs/how-to/test-a-workflow.md",
    "docs/index.md",
    "docs/tutorial.md",
]
#: Words in a sentence at most, so that it is understood the first time. A line of a list may be longer.
MAX_WORDS = 25
#: Written in pieces, so that this file does not hold what it looks for.
UNWANTED = re.compile("how-man" + r"ieth|\btid" + r"ings\b|\bbe" + r"got\b|\bbe" + r"fall\b", re.IGNORECASE)
SOURCE = ROOT / "src" / "keepstep"
#: Modules whose docstrings and comments have not been revised. The list may only become shorter.
NOT_YET = {
    "kernel/hooks.py",
    "kernel/host.py",
    "stores/sqlite/claims.py",
    *(str(path.relative_to(SOURCE)) for path in (SOURCE / "testing").rglob("*.py")),
}
#: Modules with a local name that says nothing about its value. The list may only become shorter.
NOT_YET_NAMED = {
    "kernel/replay.py",
    "stores/sqlite/claims.py",
    "testing/events.py",
    "testing/histories.py",
    "testing/store_contract/writing.py",
}
#: Sentences without a concrete subject, negation on the noun, constants without a unit, and archaic words.
FOREIGN = re.compile(
    r"(?:^|(?<=[.;:] ))(?:What|Who|Whoever|Whatever)\b(?![^.;:]*\?)"
    r"|(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|such\b)"
    r"|\bso (?:long|many|few)\b(?! (?:that|as)\b)"
    r"|\b(?:anew|lest|whoever|for ever)\b"
)
#: Names that say how a value came about, not what it is.
EMPTY_NAMES = {"told", "said", "heard", "untold"}


def sentences(text):
    """The sentences of the paragraphs of a page: no code, headings, tables or lists."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "x", text).replace("**", "")
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.match(r"\s*(#|\||-|>|\d+\.)", paragraph):
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def test_changelog_has_the_usual_headings():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.*)$", text, flags=re.MULTILINE)
    assert set(headings) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert not re.findall(r"^- (?:Added|Changed|Fixed)\b", text, flags=re.MULTILINE), "the heading says that"


def test_glossary_defines_each_word_once():
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    words = [line.split("|")[1].strip() for line in lines if line.startswith("| ") and not line.startswith("| word ")]
    assert len(words) > 50
    assert sorted(words) == sorted(set(words))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_standard_words(path):
    assert UNWANTED.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", PLAIN)
def test_sentences_are_short(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [found for found in sentences(text) if len(found.split()) > MAX_WORDS] == []


def test_long_sentences_are_found():
    long = "one " * (MAX_WORDS + 1)
    assert [len(found.split()) for found in sentences(f"# Head\n\nShort. {long}end.\n\n- {long}")] == [1, MAX_WORDS + 2]


def prose(text):
    """The paragraphs of the docstrings and the blocks of comments in a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                yield " ".join(paragraph.split())
    block, last = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    yield " ".join(block)


def empty_names(text):
    """The variables, parameters and functions of a module that are named after how they came about."""
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name.strip("_") in EMPTY_NAMES:
                yield name


MODULES = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py"))]


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NOT_YET])
def test_source_is_written_in_plain_english(name):
    text = (SOURCE / name).read_text(encoding="utf-8")
    assert [found for found in prose(text) if FOREIGN.search(found)] == []


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NOT_YET_NAMED])
def test_names_say_what_a_value_is(name):
    assert list(empty_names((SOURCE / name).read_text(encoding="utf-8"))) == []


def test_lists_of_unrevised_modules_become_shorter():
    texts = {name: (SOURCE / name).read_text(encoding="utf-8") for name in MODULES}
    foreign = {name for name, text in texts.items() if any(map(FOREIGN.search, prose(text)))}
    named = {name for name, text in texts.items() if any(empty_names(text))}
    revised = {name for name in NOT_YET if not name.startswith("testing/")} - foreign
    assert not revised, f"remove from NOT_YET: {sorted(revised)}"
    assert not NOT_YET_NAMED - named, f"remove from NOT_YET_NAMED: {sorted(NOT_YET_NAMED - named)}"


def test_foreign_sentences_are_found():
    text = '''"""What a thing does."""\n# It is no step.\n\n#: So long is waited.\nTOLD = said = 1\n'''
    assert [bool(FOREIGN.search(found)) for found in prose(text.replace("So long", "It is so long"))] == [
        True,
        False,
        True,
        True,
    ]
    assert list(empty_names(text)) == ["said"]
