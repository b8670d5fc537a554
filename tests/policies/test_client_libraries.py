"""Errors of client libraries are classed by shape, and their Retry-After is honoured, without importing any of them.

httpx, requests, aiohttp and urllib raise their own errors here. Those of botocore, openai and anthropic are made with
the names, bases and attributes that these libraries give them.
"""

import email.message
import subprocess
import sys
import urllib.error
from types import SimpleNamespace

import aiohttp
import httpx
import pytest
import requests
from multidict import CIMultiDict
from yarl import URL

from keepstep.policies import Again, Retry, classify

#: HTTP statuses, and the classes of their errors in every library.
STATUSES = {
    400: "validation",
    401: "authentication",
    403: "authorization",
    404: "permanent",
    409: "permanent",
    410: "permanent",
    422: "validation",
    429: "rate limited",
    500: "internal",
    502: "transient",
    503: "transient",
    504: "timeout",
    507: "resource exhausted",
}
NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT
DATE = "Tue, 14 Nov 2023 22:14:00 GMT"


def of_httpx(status, headers):
    response = httpx.Response(status, headers=headers, request=httpx.Request("GET", "http://service"))
    with pytest.raises(httpx.HTTPStatusError) as info:
        response.raise_for_status()
    return info.value


def of_requests(status, headers):
    response = requests.Response()
    response.status_code, response.url = status, "http://service"
    response.headers.update(headers)
    with pytest.raises(requests.HTTPError) as info:
        response.raise_for_status()
    return info.value


def of_aiohttp(status, headers):
    about = aiohttp.RequestInfo(URL("http://service"), "GET", CIMultiDict(), URL("http://service"))
    return aiohttp.ClientResponseError(about, (), status=status, message="x", headers=CIMultiDict(headers))


def of_urllib(status, headers):
    held = email.message.Message()
    for name, value in headers.items():
        held[name] = value
    return urllib.error.HTTPError("http://service", status, "x", held, None)


def of_botocore(status, headers):
    lower = {name.lower(): value for name, value in headers.items()}
    about = {"HTTPStatusCode": status, "HTTPHeaders": lower, "RetryAttempts": 0}
    response = {"Error": {"Code": str(status), "Message": "x"}, "ResponseMetadata": about}
    return made("botocore.exceptions", "ClientError", response=response, operation_name="GetObject")


#: The errors of openai and anthropic, which generate theirs alike. All others from 500 on are `InternalServerError`.
NAMES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}


def of_openai(status, headers, library="openai"):
    response = httpx.Response(status, headers=headers, request=httpx.Request("POST", "http://service"))
    name = NAMES.get(status, "InternalServerError" if status >= 500 else "APIStatusError")
    about = {"response": response, "status_code": status, "body": None, "code": None, "request_id": "r"}
    return made(library, name, ("APIError", "APIStatusError"), **about)


def of_anthropic(status, headers):
    return of_openai(status, headers, "anthropic")


def made(module, name, parents=(), **attributes):
    """An error of a library that is not installed, with these bases."""
    kind = Exception
    for one in (*parents, name):
        kind = type(one, (kind,), {"__module__": module})
    error = kind("x")
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


LIBRARIES = [of_httpx, of_requests, of_aiohttp, of_urllib, of_botocore, of_openai, of_anthropic]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda one: one.__name__.removeprefix("of_"))
def test_status_decides_the_class_in_every_library(library):
    found = {status: classify(library(status, {})).value for status in STATUSES}
    assert found == STATUSES


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda one: one.__name__.removeprefix("of_"))
@pytest.mark.parametrize("written", ["40", DATE])
def test_retry_after_of_every_library_is_the_least_wait(library, written):
    error = library(429, {"Retry-After": written})
    assert Retry(attempts=2, base_seconds=1).decide(1, classify(error), error, now=NOW) == Again(40.0)


REQUEST = httpx.Request("GET", "http://service")


@pytest.mark.parametrize(
    "error, expected",
    [
        (httpx.ConnectError("x"), "network"),
        (httpx.ReadError("x"), "network"),
        (httpx.RemoteProtocolError("x"), "network"),
        (httpx.ConnectTimeout("x"), "timeout"),
        (httpx.ReadTimeout("x"), "timeout"),
        (httpx.PoolTimeout("x"), "timeout"),
        (httpx.InvalidURL("x"), "validation"),
        (httpx.UnsupportedProtocol("x"), "validation"),
        (requests.ConnectionError("x"), "network"),
        (requests.ConnectTimeout("x"), "timeout"),
        (requests.ReadTimeout("x"), "timeout"),
        (requests.exceptions.ChunkedEncodingError("x"), "network"),
        (requests.exceptions.InvalidURL("x"), "validation"),
        (requests.exceptions.MissingSchema("x"), "validation"),
        (requests.exceptions.SSLError("x"), "network"),
        (aiohttp.ServerDisconnectedError(), "network"),
        (aiohttp.ClientPayloadError("x"), "network"),
        (aiohttp.ServerTimeoutError("x"), "timeout"),
        (aiohttp.ClientConnectorError(SimpleNamespace(host="h", port=1, ssl=True), OSError(111, "x")), "network"),
        (aiohttp.InvalidURL("x"), "validation"),
        (urllib.error.URLError(ConnectionRefusedError()), "network"),
        (urllib.error.URLError(TimeoutError()), "timeout"),
        (made("botocore.exceptions", "EndpointConnectionError", ("BotoCoreError", "ConnectionError")), "network"),
        (made("botocore.exceptions", "ReadTimeoutError", ("BotoCoreError", "HTTPClientError")), "timeout"),
        (made("botocore.exceptions", "NoCredentialsError", ("BotoCoreError",)), "authentication"),
        (made("openai", "APIConnectionError", ("APIError",)), "network"),
        (made("openai", "APITimeoutError", ("APIError", "APIConnectionError")), "timeout"),
        (made("anthropic", "OverloadedError", ("APIError", "APIStatusError"), status_code=529), "transient"),
        (made("anthropic", "InternalServerError", ("APIError", "APIStatusError"), status_code=529), "transient"),
    ],
    ids=lambda one: f"{type(one).__module__}.{type(one).__name__}" if isinstance(one, Exception) else one,
)
def test_trouble_without_a_status_is_classed_by_type(error, expected):
    assert classify(error) == expected


@pytest.mark.parametrize(
    "code, status",
    [
        ("ProvisionedThroughputExceededException", 400),
        ("RequestLimitExceeded", 503),
        ("BandwidthLimitExceeded", 509),
        ("EC2ThrottledException", 503),
        ("Throttling", 400),
    ],
)
def test_throttling_of_aws_is_a_rate_limit_whatever_its_status(code, status):
    error = of_botocore(status, {})
    error.response["Error"]["Code"] = code
    assert classify(error) == "rate limited"


def test_classifying_imports_no_client_library():
    code = (
        "import sys, keepstep.policies as p\n"
        "p.classify(type('RateLimitError', (Exception,), {'__module__': 'openai'})())\n"
        "print(sorted({'httpx', 'requests', 'aiohttp', 'botocore', 'openai', 'anthropic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
