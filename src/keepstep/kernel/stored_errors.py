"""Turns an exception into its stored form, without secrets."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import BodyLost, ExecutionError, StepError, StepTimedOut
from ..model.frames import FAR_TRACEBACK
from ..model.ids import new_id
from ..model.text import one_line
from ..policies.classify import Classifier, ErrorClass, Rule, classify
from ..records.record import StoredError
from ..values.redact import REDACTED
from .failure_point import caused_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..values import Values
    from .driver import RunDriver

log = logging.getLogger("keepstep")

#: Maximum length of a stored traceback, in characters. The middle of a longer one is left out.
MAX_TRACEBACK = 20_000
#: Maximum length of a stored message, in characters.
MAX_MESSAGE = 10_000
#: Upper bound of a number that counts as an HTTP status or an errno.
MAX_CODE = 1_000_000
#: Exceptions of a chain of causes that are stored at most with a registered exception.
MAX_CAUSES = 10

#: The classes of calls, as Python names them in the message of a wrong use.
_CALLS = re.compile(r"'(?:Step|Plain|Signal|Sleep|Start|Send|Graph)Call'|'ChildResult'")
_CODES: dict[type, str] = {
    BodyLost: "ks:body-lost",
    ExecutionError: "ks:execution",
    StepTimedOut: "ks:step-timed-out",
}


def stored_error(error: BaseException, error_class: str, attempt: int, run: RunDriver) -> StoredError:
    """Return the stored form of an exception, with secrets removed."""
    redact = run.host.redaction.redact
    text = getattr(error, FAR_TRACEBACK, None) or "".join(traceback.format_exception(error))
    if len(text) > MAX_TRACEBACK:
        text = text[: MAX_TRACEBACK // 2] + "\n  …\n" + text[-MAX_TRACEBACK // 2 :]
    return StoredError(
        type=clean(name_of(type(error))),
        message=_message_of(error, redact),
        error_class=error_class,
        code=_CODES.get(type(error)) or _outside_code(error),
        traceback=clean(redact(text)),
        attempt=attempt,
        id=new_id("error"),
        caused_by=caused_by(error),
    )


def stored_exception(error: BaseException, values: Values, run: RunDriver, where: str) -> bytes | None:
    """Return the value that brings an exception of a registered class back with its causes; None for other classes.

    Texts in it are redacted. An exception that cannot be stored is logged, and comes back like an unregistered one.
    """
    try:
        if values.known.of_type(type(error)) is None:
            return None
        redact, one = run.host.redaction.redact, error.__cause__
        chain: list[Any] = []
        while one is not None and len(chain) < MAX_CAUSES:
            known = values.known.of_type(type(one)) is not None
            chain.append(one if known else {"type": clean(name_of(type(one))), "message": _message_of(one, redact)})
            one = one.__cause__
        data = msgspec.json.encode(_redacted(msgspec.json.decode(values.encode([error, *chain], where)), redact))
        run.host.redaction.check(data.replace(REDACTED.encode(), b""), where)  # it may be too large, or hold bytes
    except Exception as problem:  # noqa: BLE001 - the failure itself must be recorded
        log.warning(
            "run %s: %s raised in %s cannot be stored, so it comes back as an unregistered one: %s",
            *(run.id, clean(name_of(type(error))), where, one_line(run.host.redaction.redact(str(problem)))),
        )
        return None
    return data


def _redacted(part: Any, redact: Callable[[str], str]) -> Any:
    """Return plain data with every text redacted, except the tags of classes."""
    if isinstance(part, str):
        return redact(part)
    if isinstance(part, list):
        return [_redacted(item, redact) for item in part]
    if isinstance(part, dict):
        return {key: item if key == "$" else _redacted(item, redact) for key, item in part.items()}
    return part


def reported_error(error: BaseException | str, kind: str, redact: Callable[[str], str]) -> StoredError:
    """Return the stored form of an error that somebody outside the run reports; `kind` names its class.

    It has no id yet, so that the same report is the same text.
    """
    if isinstance(error, BaseException):
        about = str(classify(error)), _outside_code(error)
        return StoredError(clean(kind or name_of(type(error))), _message_of(error, redact), *about)
    return StoredError(clean(kind or "keepstep.WaitFailed"), _message_of(error, redact))


def root_of(error: BaseException | None, run: RunDriver) -> StoredError | None:
    """Return the error behind the failed step, child or graph that ended a run, without its traceback; None if none."""
    while isinstance(error, ExecutionError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, StepError):
        root = error.root
        return None if root is None else StoredError(root.type, root.message, root.error_class, root.code)
    return None if error is None else reported_error(error, "", run.host.redaction.redact)


def name_of(kind: type) -> str:
    """Return the stored name of a class of exceptions."""
    bare = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if bare else f"{kind.__module__}.{kind.__qualname__}"


def _message_of(error: object, redact: Callable[[str], str]) -> str:
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - an exception without a readable message is still a failure
        message = f"<the message cannot be shown: str() raised {type(broken).__name__}>"
    if isinstance(error, (AttributeError, TypeError)) and _CALLS.search(message):
        message = f"{message}; a call that has not run was used as its value: did you forget `await` or `.result()`?"
    return clean(redact(message[: 2 * MAX_MESSAGE]))[:MAX_MESSAGE]  # cut last: half a secret is not recognised


def _outside_code(error: BaseException) -> str | None:
    """Return the HTTP status or errno that an exception carries."""
    for name in ("status_code", "status", "errno"):
        code = None
        with contextlib.suppress(Exception):  # a property of the user's class may raise anything
            code = getattr(error, name, None)
        if isinstance(code, int) and abs(code) < MAX_CODE:
            return str(code)
    return None


def clean(text: str) -> str:
    """Return the text with every lone surrogate replaced, because no file can hold one."""
    return text.encode("utf-8", "replace").decode()


def class_of(error: BaseException, rules: tuple[Rule, ...]) -> str:
    """Return the class of an error by a user's rules, then by the built-in ones. A rule that fails is left out."""
    if not rules:
        return str(classify(error))
    return str(Classifier(tuple(partial(_guarded, rule) for rule in rules))(error))


def _guarded(rule: Rule, error: BaseException) -> ErrorClass | None:
    """Ask a user's rule. It decides nothing if it fails: the error of a step must not be replaced by another."""
    try:
        found = rule(error)
        return None if found is None else ErrorClass(found)
    except Exception:
        log.exception("the rule %r of classify= failed for a %s; it is left out", rule, name_of(type(error)))
        return None
