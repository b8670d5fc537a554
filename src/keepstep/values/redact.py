"""Redaction: which texts look like secrets, how they are blotted out, and where in a value they stand."""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Iterable
from typing import Any

import msgspec

from .secret import Secret

REDACTED = "[redacted]"

#: What common secrets look like. A group called `secret` says which part is blotted out; otherwise it is the whole.
#: Repetitions that can fail late have a limit, so that no text takes more than a linear time.
DEFAULTS: tuple[str, ...] = (
    r"\bsk-(?=[A-Za-z_\-]{0,60}[0-9])[A-Za-z0-9_\-]{16,}",  # OpenAI, Anthropic, OpenRouter
    r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS
    r"\bAIza[0-9A-Za-z_\-]{35}",  # Google
    r"\bgh[oprsu]_[A-Za-z0-9]{20,}",  # GitHub
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_\-]{20,}",  # GitLab
    r"\bhf_[A-Za-z0-9]{30,}",  # Hugging Face
    r"\bxox[abeoprs]-[A-Za-z0-9\-]{10,}",  # Slack
    r"\beyJ[\w\-]{10,300}\.eyJ[\w\-]{10,4000}\.[\w\-]{10,}",  # a JSON Web Token
    r"(?i)\b(?:bearer|basic)\s+(?=[a-z\-._~+/]{0,60}[0-9])(?P<secret>[a-z0-9\-._~+/]{16,}=*)",
    r"://[^\s/:@]{0,256}:(?P<secret>[^\s/@]{1,256})@",  # https://user:password@host
    # password=hunter2, but not code such as password=os.environ["PASSWORD"]
    r"(?i)\b(?:password|passwd|pwd)=(?!(?:none|null|true|false|password)\b)(?P<secret>[^\s&;,#\"'()\[\]{}<>$*]{4,}+)(?![(\[{])",
    r"(?i)[?&](?:access_token|auth_token|token|api_?key|client_secret|secret)=(?P<secret>[^\s&#\"']+)",
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
)


#: What a text must hold, in small letters, for a built-in pattern to match: almost every value holds none of these.
_HINTS: tuple[tuple[str, ...], ...] = (
    ("sk-",),
    ("k_live_", "k_test_"),
    ("akia", "asia"),
    ("aiza",),
    ("gho_", "ghp_", "ghr_", "ghs_", "ghu_"),
    ("github_pat_",),
    ("glpat-",),
    ("hf_",),
    ("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-"),
    ("eyj",),
    ("bearer", "basic"),
    ("://",),
    ("password=", "passwd=", "pwd="),
    ("token=", "key=", "secret="),
    ("-----begin ",),
)
_HINTED: dict[str | re.Pattern[str], tuple[str, ...]] = dict(zip(DEFAULTS, _HINTS, strict=True))
#: Characters that most hints hold and most values do not: without them, nothing more need be looked for.
_GATES = ("_", "-", "=")


class Redactor:
    """Finds texts that match any of `patterns`, and those that `Secret.reveal` has given out in this process."""

    def __init__(self, patterns: Iterable[str | re.Pattern[str]] = DEFAULTS) -> None:
        given = self._given = tuple(patterns)
        self._patterns = tuple(re.compile(pattern) for pattern in given)
        hints = {hint: None for pattern in given for hint in _HINTED.get(pattern, ())}
        self._gated = [hint for hint in hints if any(gate in hint for gate in _GATES)]
        self._hints = [hint for hint in hints if hint not in self._gated]
        self._all_hinted = all(pattern in _HINTED for pattern in given)

    def also(self, patterns: Iterable[str | re.Pattern[str]]) -> Redactor:
        """One that looks for these patterns too; this one, if it does already."""
        more = [pattern for pattern in patterns if pattern not in self._given]
        return type(self)((*self._given, *more)) if more else self

    def text(self, text: str) -> str:
        """The text with every secret in it replaced."""
        for pattern in self._patterns:
            text = pattern.sub(_blot, text)
        for secret in Secret.revealed:
            text = text.replace(secret, REDACTED)
        return text

    def hit(self, value: Any) -> str | None:
        """The path of the first secret in plain data, or in JSON text given as bytes; None if there is none.

        The path of the value itself is "". The name in a stored `Secret` is not a secret.
        """
        if isinstance(value, bytes):
            if not self._may_hold(value):
                return None
            try:
                value = msgspec.json.decode(value)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                value = value.decode("latin-1")
        return self._find(value)

    def _may_hold(self, data: bytes) -> bool:
        """Whether it is worth looking into stored text: a quick look that never overlooks anything."""
        small = data.lower().decode("latin-1")  # to look into text costs a quarter of what it costs to look into bytes
        if '"' not in small:
            return False
        if not self._all_hinted or '"$":"byte' in small or self._hints_at(small):
            return True
        return bool(Secret.revealed) and any(text in data for text in Secret.revealed.values())

    def _hints_at(self, small: str) -> bool:
        """Whether a text in small letters holds what any of the built-in patterns needs."""
        for hint in self._hints:
            if hint in small:
                return True
        for gate in _GATES:
            if gate in small:
                return any(hint in small for hint in self._gated)
        return False

    def _find(self, value: Any) -> str | None:
        """A walk with its own stack, so that the depth of a value does not matter; in the value's order."""
        todo: list[tuple[str, Any]] = [("", value)]
        while todo:
            path, item = todo.pop()
            if isinstance(item, str):
                if self._matches(item):
                    return path
            elif isinstance(item, (bytes, bytearray)):
                if self._matches(item.decode("latin-1")):
                    return path
            elif isinstance(item, dict):
                todo.extend(reversed(_parts(path, item)))
            elif isinstance(item, (list, tuple, set, frozenset)):
                todo.extend((f"{path}[{index}]", part) for index, part in reversed(list(enumerate(item))))
        return None

    def _matches(self, text: str) -> bool:
        worth_it = not self._all_hinted or not text.isascii() or self._hints_at(text.lower())
        if worth_it and any(pattern.search(text) for pattern in self._patterns):
            return True
        return any(one in text for one in Secret.revealed)


def _parts(path: str, item: dict[Any, Any]) -> list[tuple[str, Any]]:
    tag = item.get("$")
    if tag == "secret":
        return []
    if tag in ("bytes", "bytearray"):
        try:
            return [(path, a2b_base64(item["v"]))]
        except (Base64Error, KeyError, TypeError, ValueError):
            return [(path, item.get("v"))]
    if "$" in item:
        return [(path, part) for part in item.values()]
    parts: list[tuple[str, Any]] = []
    for key, part in item.items():
        parts += [(f"{path}[a key]", key), (f"{path}[{key!r}]", part)]
    return parts


def _blot(match: re.Match[str]) -> str:
    if "secret" not in match.re.groupindex:
        return REDACTED
    start, end = match.span("secret")
    return match.string[match.start() : start] + REDACTED + match.string[end : match.end()]
