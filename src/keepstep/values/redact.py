"""Redaction: patterns of secrets, their replacement in texts, and their paths in values."""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from .secret import Secret

REDACTED = "[redacted]"

#: Patterns of common secrets. A group called `secret` marks the part to redact; without it the whole match is redacted.
#: Repetitions that can fail late are limited, so that matching takes linear time.
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


class _Sign:
    """Fixed texts that every match of a built-in pattern contains, `offset` characters after its start.

    Almost no value contains one of them, and a search for a fixed text costs a hundredth of matching the pattern.
    """

    __slots__ = ("any_case", "offset", "texts")

    def __init__(self, offset: int, *texts: str, any_case: bool = False) -> None:
        self.offset, self.texts, self.any_case = offset, texts, any_case

    def places(self, text: str, small: str) -> Iterator[int]:
        """Yield the positions at which to try the pattern; `small` is the text in lower case."""
        looked_in = small if self.any_case else text
        for sign in self.texts:
            at = looked_in.find(sign)
            while at >= 0:
                if at >= self.offset:
                    yield at - self.offset
                at = looked_in.find(sign, at + 1)


_TOKENS = ("token=", "apikey=", "api_key=", "secret=", "access_token=", "auth_token=", "client_secret=")
_SIGNS: tuple[_Sign, ...] = (
    _Sign(0, "sk-"),
    _Sign(1, "k_live_", "k_test_"),
    _Sign(0, "AKIA", "ASIA"),
    _Sign(0, "AIza"),
    _Sign(0, "gho_", "ghp_", "ghr_", "ghs_", "ghu_"),
    _Sign(0, "github_pat_"),
    _Sign(0, "glpat-"),
    _Sign(0, "hf_"),
    _Sign(0, "xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-"),
    _Sign(0, "eyJ"),
    _Sign(0, "bearer", "basic", any_case=True),
    _Sign(0, "://"),
    _Sign(0, "password=", "passwd=", "pwd=", any_case=True),
    _Sign(1, *_TOKENS, any_case=True),
    _Sign(0, "-----BEGIN "),
)
_SIGN_OF: dict[str | re.Pattern[str], _Sign] = dict(zip(DEFAULTS, _SIGNS, strict=True))
#: Characters of most signs that most values lack. If one is missing, signs that contain it need no search.
_GATES = "_-="


class _Pattern(NamedTuple):
    """A pattern, and its sign if it has one."""

    regex: re.Pattern[str]
    sign: _Sign | None

    def is_in(self, text: str, small: str) -> bool:
        """Whether the pattern matches anywhere in the text."""
        if self.sign is None:
            return self.regex.search(text) is not None
        match = self.regex.match
        return any(match(text, at) for at in self.sign.places(text, small))


class Redactor:
    """Finds texts that match any of `patterns`, and secrets that `Secret.reveal` returned in this process."""

    def __init__(self, patterns: Iterable[str | re.Pattern[str]] = DEFAULTS) -> None:
        given = self._given = tuple(patterns)
        self._patterns = tuple(_Pattern(re.compile(pattern), _SIGN_OF.get(pattern)) for pattern in given)
        self._all_signed = all(pattern.sign is not None for pattern in self._patterns)
        signs = {text.lower(): None for one in self._patterns if one.sign is not None for text in one.sign.texts}
        self._gated = [text for text in signs if any(gate in text for gate in _GATES)]
        self._ungated = [text for text in signs if text not in self._gated]

    def also(self, patterns: Iterable[str | re.Pattern[str]]) -> Redactor:
        """Return a redactor that also looks for these patterns; this one if it already does."""
        more = [pattern for pattern in patterns if pattern not in self._given]
        return type(self)((*self._given, *more)) if more else self

    def text(self, text: str) -> str:
        """Return the text with every secret replaced."""
        small = _small(text)
        for pattern in self._worth_trying(text, small) if self._shows_a_sign(small) else ():
            if pattern.is_in(text, small):
                text = pattern.regex.sub(_blot, text)
                small = _small(text)
        for secret, in_json in Secret.revealed.items():
            text = text.replace(secret, REDACTED).replace(in_json.decode(), REDACTED)
        return text

    def hit(self, value: Any) -> str | None:
        """Return the path of the first secret in plain data, or in JSON text given as bytes; None if there is none.

        The path of the value itself is "". The name in a stored `Secret` is not a secret.
        """
        if not isinstance(value, bytes):
            return self._find(value, self._patterns)
        small = value.lower().decode("latin-1")  # a search in text costs a quarter of a search in bytes
        if '"' not in small:
            return None
        worth_trying: Sequence[_Pattern] = ()
        if self._shows_a_sign(small):
            worth_trying = self._worth_trying(value.decode("latin-1"), small)
        revealed = Secret.revealed and any(text in value for text in Secret.revealed.values())
        if not worth_trying and not revealed and '"$":"byte' not in small:
            return None
        try:
            plain = msgspec.json.decode(value)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            plain = value.decode("latin-1")
        return self._find(plain, worth_trying)

    def _shows_a_sign(self, small: str) -> bool:
        """Whether any pattern may match in lower-case text: a quick check that clears most values."""
        if not self._all_signed:
            return True
        for sign in self._ungated:
            if sign in small:
                return True
        for gate in _GATES:
            if gate in small:
                return any(sign in small for sign in self._gated)
        return False

    def _worth_trying(self, text: str, small: str) -> list[_Pattern]:
        """Return the patterns that may match in a text, or in the decoded form of a JSON text. It misses none."""
        missing = [gate for gate in _GATES if gate not in text]
        found = []
        for pattern in self._patterns:
            sign = pattern.sign
            if sign is None:
                found.append(pattern)
                continue
            looked_in = small if sign.any_case else text
            for one in sign.texts:
                if not any(gate in one for gate in missing) and one in looked_in:
                    found.append(pattern)
                    break
        return found

    def _find(self, value: Any, patterns: Sequence[_Pattern]) -> str | None:
        """Search with an explicit stack, so that the depth of a value does not matter, in the order of the value.

        All patterns are tried on bytes, because the stored text of bytes differs from their content.
        """
        todo: list[tuple[str, Any]] = [("", value)]
        while todo:
            path, item = todo.pop()
            if isinstance(item, str):
                if _matches(item, patterns):
                    return path
            elif isinstance(item, (bytes, bytearray)):
                text = item.decode("latin-1")
                if _matches(text, self._worth_trying(text, _small(text))):
                    return path
            elif isinstance(item, dict):
                todo.extend(reversed(_parts(path, item)))
            elif isinstance(item, (list, tuple, set, frozenset)):
                todo.extend((f"{path}[{index}]", part) for index, part in reversed(list(enumerate(item))))
        return None


def _matches(text: str, patterns: Sequence[_Pattern]) -> bool:
    if patterns:
        small = _small(text)
        if any(pattern.is_in(text, small) for pattern in patterns):
            return True
    return any(one in text for one in Secret.revealed)


def _small(text: str) -> str:
    """Return the text in lower case, with every character at its position."""
    small = text.lower()
    # U+0130 is the only letter whose lower case has two characters.
    return small if len(small) == len(text) else text.replace("\u0130", "i").lower()


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


def masked(plain: Any, redact: Callable[[str], str]) -> Any:
    """Return plain data with all its texts redacted."""
    if isinstance(plain, str):
        return redact(plain)
    if isinstance(plain, list):
        return [masked(part, redact) for part in plain]
    if isinstance(plain, dict):
        return {redact(key): masked(part, redact) for key, part in plain.items()}
    return plain
