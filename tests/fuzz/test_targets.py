"""Every parser, with what is kept in the corpus, with what Hypothesis makes of it, and with bombs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.nightly import case

from .guard import nothing_but_parsing
from .targets import TARGETS, clear, folder

CORPUS = Path(__file__).parent / "corpus"
#: What takes a store or a whole command per input gets fewer of them.
SLOW = {"rows", "database", "store_url", "command_line"}
#: No file of the corpus is larger: it is read by people, too.
LARGEST = 20_000


def kept(name: str) -> list[Path]:
    return sorted(path for path in (CORPUS / name).iterdir() if path.is_file())


def test_every_target_has_a_corpus_of_small_files():
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    for name in TARGETS:
        assert kept(name)
        assert max(path.stat().st_size for path in kept(name)) <= LARGEST


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_kept_breaks_nothing(name):
    for path in kept(name):
        try:
            TARGETS[name](path.read_bytes())
        except BaseException as error:
            error.add_note(f"given {path}")
            raise


# -- mutated ----------------------------------------------------------------------------------------------------------

TOKENS = [
    b"\0",
    b"\xff",
    b"\xff\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"9" * 40,
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b'""',
    b'"$"',
    b'"$":"tuple"',
    b'"$":"dict"',
    b"9999-12-31T23:59:59Z",
    b"0001-01-01T00:00:00+14:00",
    b"i\x7f" + b"\xff" * 7,
    b"f\x7f\xf0" + b"\0" * 6,
    b"text",
    b"b\xff",
    b"../",
    b"ks:",
    b"=",
    b":",
    b"--",
]
CUTS = st.tuples(
    st.sampled_from(["insert", "replace", "delete", "repeat", "truncate"]),
    st.integers(0, 2**16),
    st.integers(0, 40),
    st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8)),
)


def mutated(data: bytes, cuts: list[tuple[str, int, int, bytes]]) -> bytes:
    """A document with a few changes, most of which leave it nearly valid."""
    for what, at, length, new in cuts:
        place = at % (len(data) + 1)
        end = place + length
        if what == "insert":
            data = data[:place] + new + data[place:]
        elif what == "replace":
            data = data[:place] + new + data[place + len(new) :]
        elif what == "delete":
            data = data[:place] + data[end:]
        elif what == "repeat":
            data = data[:end] + data[place:]
        else:
            data = data[:place]
    return data[:100_000]


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_documents_break_nothing(name):
    number = 30 if name in SLOW else 300

    @settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(kept(name)), st.lists(CUTS, min_size=1, max_size=5))
    def check(path: Path, cuts: list[tuple[str, int, int, bytes]]) -> None:
        TARGETS[name](mutated(path.read_bytes(), cuts))

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_break_nothing(name):
    @settings(max_examples=20 if name in SLOW else 200, deadline=None, database=None)
    @given(st.one_of(st.binary(max_size=200), st.text(max_size=100).map(lambda text: text.encode("utf-8", "ignore"))))
    def check(data: bytes) -> None:
        TARGETS[name](data)

    check()


# -- bombs ------------------------------------------------------------------------------------------------------------


def bombs() -> dict[str, bytes]:
    """Small or large texts whose reading could take for ever, or everything."""
    deep, long = 200_000, 10_000_000
    record = b'{"run":"r","kind":"step completed","seq":1,"format":1,'
    return {
        "lists": b"[" * deep,
        "closed lists": b"[" * deep + b"]" * deep,
        "objects": b'{"a":' * deep + b"1" + b"}" * deep,
        "tags": b'{"$":"tuple","v":[' * deep,
        "closed tags": b'{"$":"tuple","v":[' * 900 + b"]}" * 900,
        "pairs": b'{"$":"dict","v":[[' * 900 + b"]]}" * 900,
        "digits": b"9" * long,
        "tagged digits": b'{"$":"int","v":"0x' + b"f" * long + b'"}',
        "decimal": b'{"$":"decimal","v":"' + b"9" * long + b'"}',
        "exponent": b'{"$":"decimal","v":"1E+999999999999999999"}',
        "range": b'{"$":"range","v":[0,' + b"9" * 600 + b",1]}",
        "text": b'"' + b"x" * long + b'"',
        "escapes": b'"' + b"\\u0041" * (long // 6) + b'"',
        "spaces": b" " * long + b"1",
        "keys": b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}",
        "minus": b"-" * long,
        "colons": b":" * long,
        "record": record + b'"value":' + b"[" * deep,
        "record data": record + b'"data":{"a":' + b'{"a":' * deep,
        "unpacked": record + b'"packed":"zlib"}\0' + zlib.compress(b"0" * 200_000_000, 9),
        "unpacked lists": record + b'"packed":"zlib"}\0' + zlib.compress(b"[" * 50_000_000, 9),
        "lines": b"\n" * 1_000_000,
        "words": b"\0" * 10_000,
        "input": b"\x01" + b"[" * deep,
        "input text": b'\x02{"name":"' + b"x" * long + b'"}',
    }


#: One process reads all bombs, in so much memory and processor time; the honest need is a quarter of it.
MEGABYTES, SECONDS = 3000, 240
UNBOMBED = {"rows", "database", "mounts"}  # their input is not text that somebody may send


#: Parsers that read what comes from outside the store, and the records: `make test` gives the bombs to these alone.
BOMBED_FIRST = ("value", "record")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("targets", [case(BOMBED_FIRST, id="first", nightly=False), case((), id="all", nightly=True)])
def test_bombs_break_nothing(targets):
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.test_targets", *targets],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert done.stdout.split() == ["all", "read"]


def read_bombs(*targets: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    for what, data in bombs().items():
        for name in targets or set(TARGETS) - UNBOMBED:
            try:
                TARGETS[name](data[:100_000] if name == "command_line" else data)
            except BaseException as error:
                error.add_note(f"{name} was given the bomb {what!r}")
                raise
    print("all read")


# -- the watch itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        lambda: __import__("this"),
        lambda: eval("1 + 1"),
        lambda: exec("1 + 1"),
        lambda: Path(__file__).read_bytes(),
        lambda: Path("/tmp/keepstep-not-there").unlink(missing_ok=True),
        lambda: subprocess.run(["true"], check=True),
        lambda: os.system("true"),
    ],
)
def test_the_watch_sees_what_a_parser_must_not_do(act):
    with pytest.raises(AssertionError, match="did more than parse"), nothing_but_parsing():
        act()


def test_the_watch_lets_parsers_use_their_own_folder():
    path = Path(folder()) / "own.txt"
    with nothing_but_parsing(folder()):
        path.write_text("here", encoding="ascii")
    clear(path)


if __name__ == "__main__":
    read_bombs(*sys.argv[1:])
