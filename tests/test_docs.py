"""What the documentation shows, works: every block of every page, and every example."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import page

ROOT = Path(__file__).parents[1]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def name(path):
    return str(path.relative_to(ROOT))


def run(*command, cwd):
    """Run Python elsewhere, so that nothing that a page defines or leaves behind meets another's."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_there_is_a_readme():
    assert ROOT / "README.md" in PAGES


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_python_block_compiles(path):
    for block in page.blocks(path.read_text(encoding="utf-8")):
        if block.language == "python":
            page.compiled(block, str(path))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_page_runs(path, tmp_path):
    if any(block.runs for block in page.blocks(path.read_text(encoding="utf-8"))):
        run(page.__file__, path, cwd=tmp_path)


def test_programs_of_the_readme_run_as_scripts(tmp_path):
    """The runner of pages allows `await` at the top level; a file that a reader saves does not."""
    blocks = page.blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    programs = [block for block in blocks if block.language == "python" and "no-run" not in block.marks]
    assert len(programs) >= 2
    for number, block in enumerate(programs):
        script = tmp_path / f"script_{number}.py"
        script.write_text(block.text, encoding="utf-8")
        assert run(script, cwd=tmp_path), "a program of the README shows that it has done something"


def test_index_names_every_page_once():
    index = ROOT / "docs" / "index.md"
    linked = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\) \| .+ \|$", index.read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path != index and path.parent.name != "adr"]
    assert sorted(linked) == sorted(str(path.relative_to(index.parent)) for path in pages)


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_an_example_runs(path, tmp_path):
    run(path, cwd=tmp_path)


# -- the runner itself -------------------------------------------------------------------------------------------------

FENCE = "`" * 3


def shown(*blocks):
    """A page with these blocks, each given as its info line and its text."""
    return "# A page\n\n" + "\n\n".join(f"{FENCE}{info}\n{text}\n{FENCE}" for info, text in blocks) + "\n"


def run_page(tmp_path, *blocks):
    path = tmp_path / "page.md"
    path.write_text(shown(*blocks), encoding="utf-8")
    return run(page.__file__, path, cwd=tmp_path)


def test_blocks_share_a_namespace_and_may_await(tmp_path):
    out = run_page(
        tmp_path,
        ("python", "import asyncio\nx = 1"),
        ("python", "await asyncio.sleep(0)\nx += 1"),
        ("python no-run", "raise SystemExit(3)"),
        ("text", "not code"),
        ("python", "if __name__ == '__main__': print('x is', x)"),
    )
    assert out == "x is 2\n"


def test_a_failing_block_fails_the_page_and_points_into_it(tmp_path):
    with pytest.raises(AssertionError, match=r"page\.md\", line 4"):
        run_page(tmp_path, ("python", "1 / 0"))


def test_commands_run_where_the_page_runs(tmp_path):
    out = run_page(
        tmp_path,
        ("python file=hello.py", "print('hello')"),
        ("console run", "$ python hello.py \\\n> hello.txt\n$ cat hello.txt\nhello"),
        ("console", "$ exit 3"),
    )
    assert out == "hello\n"


def test_a_failing_command_fails_the_page(tmp_path):
    with pytest.raises(AssertionError, match="ended with 3"):
        run_page(tmp_path, ("console run", "$ exit 3"))


@pytest.mark.parametrize("text", [shown(("python norun", "x")), shown(("console runs", "x")), f"{FENCE}python\nx\n"])
def test_a_mark_or_fence_that_is_wrong_is_noticed(text):
    with pytest.raises(ValueError, match=r"norun|runs|not closed"):
        page.blocks(text)


def test_a_block_inside_a_list_is_dedented():
    [block] = page.blocks(f"- item\n\n  {FENCE}python\n  if 1:\n      x = 1\n  {FENCE}\n")
    assert block == page.Block("python", (), 4, "if 1:\n    x = 1\n")
