"""The quick look for secrets finds exactly what the patterns find, wherever they stand."""

import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from keepstep.values.redact import DEFAULTS, Redactor

PARTS = [
    *(
        "sk-",
        "sk-proj-a1",
        "rk_live_",
        "xk_test_",
        "AKIA",
        "ASIA0123456789ABCDEF",
        "AIza",
        "ghp_",
        "github_pat_",
        "glpat-",
    ),
    *("github_pat_", "glpat-", "hf_", "xoxb-", "eyJ"),
    *("eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abcdefghijkl", "Bearer ", "BASIC  ", "://", "://u:p@h"),
    *("password=", "PassWD=", "pwd=none", "?token=", "&API_KEY=", "?apikey", "=", "client_secret=", "&", "?"),
    *(
        "-----BEGIN RSA PRIVATE KEY-----",
        "-----BEGIN ",
        "0123456789abcdef",
        "ABCDEFGHIJKLMNOP",
        "a",
        "9",
        " ",
        ".",
        "\n",
    ),
    *("a", "9", " ", ".", "\n", "(", '"', "\\", "é", "漢", "_", "-", ":", "@", "/", "\u0130", "hunter2!"),
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
PATTERNS = [re.compile(pattern) for pattern in DEFAULTS]


def is_secret(text):
    return any(pattern.search(text) for pattern in PATTERNS)


@given(TEXTS)
def test_a_text_is_hit_exactly_if_a_pattern_matches(text):
    assert (Redactor().hit(msgspec.json.encode(text)) is not None) is is_secret(text)
    assert (Redactor().hit(text) is not None) is is_secret(text)


@given(TEXTS)
def test_text_is_redacted_exactly_where_a_pattern_matches(text):
    from keepstep.values.redact import _blot

    expected = text
    for pattern in PATTERNS:
        expected = pattern.sub(_blot, expected)
    assert Redactor().text(text) == expected


@given(st.lists(TEXTS, max_size=4), TEXTS)
def test_place_of_the_first_secret_is_given(texts, own):
    value = {"texts": texts, "own": {"$": "bytes", "v": ""}, "last": own}
    found = next((f"['texts'][{number}]" for number, text in enumerate(texts) if is_secret(text)), None)
    found = found or ("['last']" if is_secret(own) else None)
    assert Redactor().hit(msgspec.json.encode(value)) == found


@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_patterns_of_a_user_are_looked_for_everywhere(texts):
    redactor = Redactor([*DEFAULTS, r"9[a9]"])
    for text in texts:
        assert (redactor.hit(msgspec.json.encode(text)) is not None) is (
            is_secret(text) or bool(re.search("9[a9]", text))
        )
