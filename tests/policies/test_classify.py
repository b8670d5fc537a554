"""Errors are classed by type, errno, HTTP status and message, in this order."""

import asyncio
import email.message
import errno
import json
import socket
import subprocess
import urllib.error
from http import HTTPStatus
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep import errors
from keepstep.errors import DefinitionError
from keepstep.kernel.stored_errors import class_of
from keepstep.model import ErrorInfo
from keepstep.policies import Classifier, ErrorClass, by_type, checked_rules, class_of_status, classify
from keepstep.policies.retry_after import asked_wait


def made(name, bases=(Exception,), **attributes):
    """An error of a library that is not installed."""
    return type(name, bases, {"__module__": "somelib", **attributes})("x")


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error, expected",
    [
        (errors.Permanent("no"), "permanent"),
        (errors.NotSerializable("x"), "permanent"),
        (errors.ReplayMismatch("x"), "permanent"),
        (errors.RetryAfter(1), "rate limited"),
        (errors.StepTimedOut("x"), "timeout"),
        (errors.TimedOut("x"), "timeout"),
        (errors.StoreFull("x"), "resource exhausted"),
        (errors.StoreUnavailable("x"), "transient"),
        (TimeoutError(), "timeout"),
        (TimeoutError("x"), "timeout"),
        (subprocess.TimeoutExpired("ls", 1), "timeout"),
        (ConnectionResetError(), "network"),
        (socket.gaierror(socket.EAI_NONAME, "x"), "network"),
        (MemoryError(), "resource exhausted"),
        (PermissionError("x"), "authorization"),
        (ValueError("x"), "validation"),
        (TypeError("x"), "validation"),
        (json.JSONDecodeError("x", "y", 0), "validation"),
        (NotImplementedError(), "permanent"),
        (asyncio.CancelledError(), "permanent"),
        (KeyboardInterrupt(), "permanent"),
        (SystemExit(503), "permanent"),
        (KeyError("x"), "unknown"),
        (RuntimeError(), "unknown"),
        (FileNotFoundError(errno.ENOENT, "x"), "unknown"),
        (made("RateLimitError"), "rate limited"),
        (made("ThrottlingException"), "rate limited"),
        (made("ReadTimeout"), "timeout"),
        (made("ConnectTimeout", (made("ConnectionError", (OSError,)).__class__,)), "timeout"),
        (made("ConnectError"), "network"),
        (made("APIConnectionError"), "network"),
        (made("ConnectionError", (OSError,)), "network"),
        (made("Specific", (made("ServiceUnavailableError").__class__,)), "transient"),
        (made("AuthenticationError"), "authentication"),
        (made("PermissionDeniedError"), "authorization"),
        (made("ValidationError", (ValueError,)), "validation"),
        (made("InternalServerError"), "internal"),
        (made("SerializationFailure"), "transient"),
    ],
)
def test_error_is_classed_by_type(error, expected):
    assert classify(error) == expected


@pytest.mark.parametrize(
    "number, expected",
    [
        (errno.ECONNREFUSED, "network"),
        (errno.EHOSTUNREACH, "network"),
        (errno.ETIMEDOUT, "timeout"),
        (errno.EAGAIN, "transient"),
        (errno.EBUSY, "transient"),
        (errno.ENOSPC, "resource exhausted"),
        (errno.EMFILE, "resource exhausted"),
        (errno.EACCES, "authorization"),
        (errno.EINVAL, "validation"),
        (errno.EIO, "internal"),
        (errno.ENOENT, "unknown"),
        (999_999, "unknown"),
    ],
)
def test_error_is_classed_by_errno(number, expected):
    assert classify(OSError(number, "x")) == expected
    assert classify(made("Odd", (OSError,), errno=number)) == expected


STATUSES = {
    400: "validation",
    422: "validation",
    401: "authentication",
    403: "authorization",
    404: "permanent",
    409: "permanent",
    410: "permanent",
    429: "rate limited",
    500: "internal",
    502: "transient",
    503: "transient",
    504: "timeout",
    507: "resource exhausted",
    418: "permanent",
    408: "timeout",
    599: "internal",
}


@pytest.mark.parametrize("status, expected", STATUSES.items())
@pytest.mark.parametrize(
    "attributes",
    [
        lambda s: {"status_code": s},
        lambda s: {"status": s},
        lambda s: {"code": s},
        lambda s: {"code": str(s)},
        lambda s: {"response": SimpleNamespace(status_code=s)},
        lambda s: {"response": SimpleNamespace(status=s)},
        lambda s: {"status_code": None, "code": "some_name", "response": SimpleNamespace(status_code=s)},
    ],
)
def test_error_is_classed_by_http_status(status, expected, attributes):
    assert classify(made("Answered", **attributes(status))) == expected
    assert class_of_status(status) == expected


def test_status_of_the_standard_library_is_read():
    headers = email.message.Message()
    with urllib.error.HTTPError("http://x", 503, "busy", headers, None) as error:
        assert classify(error) == "transient"
    assert classify(made("Answered", status=HTTPStatus.TOO_MANY_REQUESTS)) == "rate limited"


@pytest.mark.parametrize("value", [200, 302, 0, 1000, True, "4xx", None, object(), lambda: 503])
def test_value_that_is_no_error_status_is_ignored(value):
    assert classify(made("Answered", status=value, code=value)) == "unknown"


@pytest.mark.parametrize(
    "message, expected",
    [
        ("Rate limit reached for requests", "rate limited"),
        ("Too Many Requests", "rate limited"),
        ("the operation timed out", "timeout"),
        ("Read timeout", "timeout"),
        ("CUDA out of memory", "resource exhausted"),
        ("You exceeded your current quota", "resource exhausted"),
        ("connection reset by peer", "network"),
        ("Temporary failure in name resolution", "network"),
        ("Invalid API key provided", "authentication"),
        ("Forbidden", "authorization"),
        ("service unavailable", "transient"),
        ("database is locked", "transient"),
        ("Internal Server Error", "internal"),
        ("2 validation errors for Model", "validation"),
        ("something went wrong", "unknown"),
        ("", "unknown"),
    ],
)
def test_error_is_classed_by_message(message, expected):
    assert classify(RuntimeError(message)) == expected


def test_the_order_is_type_errno_status_message():
    assert classify(ConnectionResetError(errno.ENOSPC, "rate limit")) == "network"
    assert classify(made("Odd", (OSError,), errno=errno.ENOSPC, status_code=429)) == "resource exhausted"
    error = made("Odd", status_code=503)
    error.args = ("rate limit",)
    assert classify(error) == "transient"


def test_a_status_says_more_than_a_type_that_everything_inherits_from():
    assert classify(made("ApiError", (ValueError,), status_code=429)) == "rate limited"
    assert classify(ValueError("rate limit")) == "validation"


def test_a_wrapped_error_is_judged_by_its_cause():
    assert classify(caused(RuntimeError("fetch failed"), ConnectionResetError())) == "network"
    assert classify(caused(RuntimeError("a"), caused(RuntimeError("b"), errors.Permanent("c")))) == "permanent"
    assert classify(urllib.error.URLError(TimeoutError())) == "timeout"


def test_what_the_error_itself_says_comes_before_its_cause():
    assert classify(caused(ValueError("bad"), ConnectionResetError())) == "validation"


def test_facts_of_a_cause_come_before_messages():
    assert classify(caused(RuntimeError("timed out"), PermissionError("x"))) == "authorization"


def test_the_error_being_handled_counts_unless_it_was_hidden():
    def fail(hide):
        try:
            raise ConnectionResetError
        except ConnectionResetError:
            if hide:
                raise RuntimeError("x") from None
            raise RuntimeError("x")  # noqa: B904 - the implicit context is the point

    for hide, expected in ((False, "network"), (True, "unknown")):
        with pytest.raises(RuntimeError) as caught:
            fail(hide)
        assert classify(caught.value) == expected


def test_a_group_is_judged_by_its_parts():
    assert classify(ExceptionGroup("x", [KeyError("y"), TimeoutError()])) == "timeout"
    assert classify(ExceptionGroup("x", [KeyError("y")])) == "unknown"
    assert classify(BaseExceptionGroup("x", [asyncio.CancelledError(), TimeoutError()])) == "permanent"


def test_a_failed_step_keeps_its_class():
    info = ErrorInfo(type="SomeError", message="x", error_class="rate limited")
    assert classify(errors.StepFailed("x", error=info)) == "rate limited"
    assert classify(errors.RunFailed("x", error=info)) == "rate limited"
    assert classify(errors.StepFailed("x", error=ErrorInfo(type="E", message="m"))) == "unknown"


def test_cyclic_or_very_long_chain_of_causes_is_unknown():
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert classify(one) == "unknown"
    error = TimeoutError()
    for _ in range(10_000):
        error = caused(RuntimeError("again"), error)
    assert classify(error) == "unknown"


def test_error_that_fails_on_inspection_is_unknown():
    class Hostile(Exception):
        def __str__(self):
            raise RuntimeError("no")

        @property
        def response(self):
            raise RuntimeError("no")

        @property
        def status_code(self):
            raise KeyError("no")

    assert classify(Hostile()) == "unknown"


@given(st.text(max_size=50), st.one_of(st.none(), st.integers(), st.text(), st.booleans()))
def test_every_error_has_a_class(message, value):
    error = made("Odd", (OSError,), status_code=value, code=value, response=value, errno=value, reason=value)
    error.args = (message,)
    assert classify(error) in set(ErrorClass)


# -- the classes themselves --------------------------------------------------------------------------------------------


def test_classes_say_if_they_retry_and_trip_the_breaker():
    assert {c.value for c in ErrorClass if not c.retryable} == {
        "validation",
        "authentication",
        "authorization",
        "permanent",
    }
    assert {c.value for c in ErrorClass if c.trips_breaker} == {
        "rate limited",
        "resource exhausted",
        "timeout",
        "network",
        "internal",
    }


# -- rules of the user's -----------------------------------------------------------------------------------------------


def test_own_rules_come_first_and_in_order():
    mine = Classifier(
        (
            by_type(ErrorClass.TRANSIENT, KeyError, ValueError),
            lambda e: ErrorClass.INTERNAL if "teapot" in str(e) else None,
        )
    )
    assert mine(ValueError("teapot")) == "transient"
    assert mine(RuntimeError("teapot")) == "internal"
    assert mine(caused(RuntimeError("x"), KeyError("y"))) == "transient"
    assert mine(TimeoutError()) == "timeout"


def test_a_rule_may_answer_with_the_name_of_a_class():
    assert Classifier([lambda _: "network"])(RuntimeError()) is ErrorClass.NETWORK


def test_a_rule_must_be_callable():
    with pytest.raises(DefinitionError):
        Classifier(("network",))


# -- answers that are dictionaries -------------------------------------------------------------------------------------


def answered(code, status, **headers):
    """An error as botocore raises it."""
    about = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return made("ClientError", response={"Error": {"Code": code, "Message": "x"}, "ResponseMetadata": about})


@pytest.mark.parametrize(
    "code, status, expected",
    [
        ("ThrottlingException", 400, "rate limited"),
        ("TooManyRequestsException", 429, "rate limited"),
        ("AccessDeniedException", 400, "authorization"),
        ("NoSuchKey", 404, "permanent"),
        ("SlowDown", 503, "transient"),
        ("ValidationException", 400, "validation"),
    ],
)
def test_answer_that_is_a_dictionary_is_classed_by_code_and_status(code, status, expected):
    assert classify(answered(code, status)) == expected


def test_wait_that_a_dictionary_asks_for_is_found():
    assert asked_wait(answered("SlowDown", 503, **{"retry-after": "7"})).seconds == 7


@pytest.mark.parametrize(
    "response", [{}, {"Error": 1, "ResponseMetadata": 2}, {"ResponseMetadata": {"HTTPStatusCode": "x"}}]
)
def test_foreign_dictionary_decides_nothing(response):
    assert classify(made("Odd", response=response)) == "unknown"


# -- rules of users ----------------------------------------------------------------------------------------------------


def test_rules_come_before_built_in_ones_in_their_order():
    rules = checked_rules([lambda _: None, lambda _: "transient", lambda _: "timeout"], "classify=")
    assert class_of(ValueError("x"), rules) == "transient"
    assert class_of(ValueError("x"), ()) == "validation"


def test_rules_of_a_classifier_are_taken_over():
    rules = checked_rules([Classifier((by_type(ErrorClass.NETWORK, KeyError),)), lambda _: "timeout"], "classify=")
    assert class_of(KeyError(), rules) == "network"
    assert class_of(ValueError(), rules) == "timeout"


@pytest.mark.parametrize("rule", [lambda _: 1 / 0, lambda _: "no such class", lambda _: 7])
def test_rule_that_fails_is_logged_and_left_out(rule, caplog):
    assert class_of(ValueError("x"), (rule,)) == "validation"
    assert "it is left out" in caplog.text


@pytest.mark.parametrize("given", ["network", 7, [7]])
def test_rules_that_are_no_functions_are_refused(given):
    with pytest.raises(DefinitionError, match="step 's': classify= takes a function"):
        checked_rules(given, "step 's': classify=")
