"""What an http step sends, what it keeps, what it refuses, and how a service's answers decide about retries."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import keepstep as ks
from keepstep.policies.classify import classify
from keepstep.values.secret import Secret
from keepstep.workflows.files.http import Request, UnexpectedStatus

pytestmark = pytest.mark.usefixtures("nothing_known")


class Service:
    """A server on this machine that answers as it is told, and remembers what it was asked."""

    def __init__(self):
        self.asked = []
        self.answers = {}
        service = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                service.asked.append((self.command, self.path, dict(self.headers.items()), body))
                given = service.answers.get(self.path.partition("?")[0], [(200, {}, b"")])
                status, headers, body = given.pop(0) if len(given) > 1 else given[0]
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - as the server calls them

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def says(self, path, *answers):
        self.answers[path] = [
            (status, headers, body if isinstance(body, bytes) else json.dumps(body).encode())
            for status, headers, body in answers
        ]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    made = Service()
    yield made
    made.close()


JSON = {"Content-Type": "application/json"}


def test_keys_go_into_the_url_the_body_and_nowhere_else(service):
    service.says("/items/a%2Fb%20%26", (201, {**JSON, "Set-Cookie": "s=1", "ETag": "x"}, {"id": 7}))
    request = Request(f"{service.url}/items/{{name}}?n={{count}}", "POST", body=(("title", "name"), ("n", "count")))
    answer = request.send({"name": "a/b &", "count": 3, "other": "secret"})
    assert answer == {"status": 201, "headers": {"content-type": "application/json", "etag": "x"}, "body": {"id": 7}}
    [(method, path, headers, body)] = service.asked
    assert (method, path) == ("POST", "/items/a%2Fb%20%26?n=3")
    assert json.loads(body) == {"title": "a/b &", "n": 3}
    assert headers["Content-Type"] == "application/json"
    assert request.keys == ("name", "count")


@pytest.mark.parametrize("value", ["..", ".", "", None, ["x"], {}])
def test_a_value_that_would_lead_elsewhere_is_refused(service, value):
    with pytest.raises(ks.Permanent, match="in the url"):
        Request(f"{service.url}/a/{{x}}/b").send({"x": value})
    assert service.asked == []


def test_missing_key_is_named(service):
    with pytest.raises(ks.Permanent, match=r"f\.yaml:3: no value for 'x' to send; known keys are a, b"):
        Request(f"{service.url}/{{x}}", where="f.yaml:3").send({"b": 1, "a": 2})


def test_secret_is_sent_and_redacted_in_errors(service, monkeypatch):
    monkeypatch.setattr(Secret, "revealed", {})
    monkeypatch.setenv("PAY_TOKEN", "very-secret-token")
    service.says("/", (403, JSON, {"why": "no very-secret-token"}))
    request = Request(f"{service.url}/", headers=(("Authorization", ("Bearer ", "PAY_TOKEN")), ("X-A", "b")))
    assert "very-secret" not in repr(request)
    with pytest.raises(UnexpectedStatus) as caught:
        request.send({})
    assert service.asked[0][2]["Authorization"] == "Bearer very-secret-token"
    assert ks.Redactor().text(str(caught.value)) == f'GET {service.url}/ answered 403: {{"why": "no [redacted]"}}'


def test_a_secret_that_would_break_the_request_is_refused_by_name(service, monkeypatch):
    monkeypatch.setattr(Secret, "revealed", {})
    monkeypatch.setenv("PAY_TOKEN", "two\r\nX-Evil: lines")
    with pytest.raises(ks.DefinitionError) as caught:
        Request(f"{service.url}/", headers=(("A", ("", "PAY_TOKEN")),)).send({})
    assert "Evil" not in str(caught.value)
    assert service.asked == []


@pytest.mark.parametrize(
    "status, error_class",
    [(400, "validation"), (401, "authentication"), (403, "authorization"), (404, "permanent"), (409, "permanent"),
     (410, "permanent"), (422, "validation"), (429, "rate limited"), (500, "internal"), (502, "transient"),
     (503, "transient"), (504, "timeout"), (507, "resource exhausted")],
)  # fmt: skip
def test_a_status_is_an_error_of_its_class(service, status, error_class):
    service.says("/", (status, {"Retry-After": "7"}, b"why"))
    with pytest.raises(UnexpectedStatus, match=rf"answered {status}: why") as caught:
        Request(f"{service.url}/?token=abc").send({})
    assert str(classify(caught.value)) == error_class
    assert caught.value.headers["retry-after"] == "7"
    assert "token" not in str(caught.value)


def test_only_what_is_expected_is_a_success(service):
    service.says("/", (404, JSON, {"gone": True}))
    assert Request(f"{service.url}/", expect=frozenset({200, 404})).send({})["body"] == {"gone": True}
    service.says("/", (202, {}, b""))
    with pytest.raises(ks.Permanent, match="answered 202; the step does not expect it"):
        Request(f"{service.url}/", expect=frozenset({201})).send({})


def test_a_redirect_is_followed_to_the_same_host_only(service):
    other = Service()
    service.says("/here", (302, {"Location": "/there"}, b""))
    service.says("/there", (200, JSON, "arrived"))
    service.says("/away", (302, {"Location": f"{other.url}/stolen"}, b""))
    service.says("/file", (302, {"Location": "file:///etc/passwd"}, b""))
    try:
        assert Request(f"{service.url}/here").send({})["body"] == "arrived"
        with pytest.raises(ks.Permanent, match="answered 302"):
            Request(f"{service.url}/here", redirects=False).send({})
        with pytest.raises(ks.Permanent, match=r"redirects to http://127\.0\.0\.1, which is not followed"):
            Request(f"{service.url}/away").send({})
        with pytest.raises(Exception, match=r"file|not allowed|not followed"):
            Request(f"{service.url}/file").send({})
        assert other.asked == []
    finally:
        other.close()


def test_an_answer_that_is_too_large_is_refused(service):
    service.says("/", (200, {}, b"x" * 2000))
    with pytest.raises(ks.Permanent, match="larger than 1,000 bytes"):
        Request(f"{service.url}/", max_bytes=1000).send({})


@pytest.mark.parametrize(
    "headers, body, kept",
    [
        (JSON, b'{"a": 1}', {"a": 1}),
        (JSON, b"not json", "not json"),
        (JSON, b"[NaN]", "[NaN]"),
        ({"Content-Type": "application/problem+json"}, b"[1]", [1]),
        ({"Content-Type": "text/plain; charset=latin-1"}, b"\xfc", "ü"),
        ({"Content-Type": "text/plain; charset=nonsense"}, b"x", "x"),
        ({"Content-Type": "image/png"}, b"\x89PNG", b"\x89PNG"),
        ({}, b"", None),
    ],
)
def test_a_body_is_kept_as_what_it_says_it_is(service, headers, body, kept):
    service.says("/", (200, headers, body))
    assert Request(f"{service.url}/").send({})["body"] == kept


def test_nobody_there_is_a_network_error():
    with pytest.raises(OSError, match=r"refused|unreachable") as caught:
        Request("http://127.0.0.1:1/").send({})
    assert str(classify(caught.value)) == "network"


# -- in a run ----------------------------------------------------------------------------------------------------------


async def test_a_service_that_is_down_is_asked_again_with_the_same_key(world, service, tmp_path):
    service.says("/pay/7", (503, {}, b""), (503, {}, b""), (201, JSON, {"paid": True}))
    path = tmp_path / "flow.yaml"
    path.write_text(
        f"""
keepstep: 1
metadata: {{name: paying}}
steps:
  pay:
    kind: http
    url: {service.url}/pay/{{order}}
    body: [amount]
    retry: {{attempts: 5, base: 1ms}}
    next: check
  check: {{kind: branch, branches: [{{when: state.pay.body.paid, next: end}}]}}
  end: {{function: nothing}}
""",
        encoding="utf-8",
    )
    graph = ks.load(path, functions={"nothing": lambda state: {}})
    async with world.engine() as engine:
        run = await engine.start(graph, order=7, amount=3)
        assert (await run.result(60))["pay"] == {
            "status": 201,
            "headers": {"content-type": "application/json"},
            "body": {"paid": True},
        }
    keys = {headers["Idempotency-Key"] for _, _, headers, _ in service.asked}
    assert (len(service.asked), len(keys)) == (3, 1)


async def test_a_dag_asks_with_its_inputs_and_the_results_of_needs(world, service, tmp_path):
    service.says("/a/x", (200, JSON, {"n": 1}))
    path = tmp_path / "flow.yaml"
    path.write_text(
        f"""
keepstep: 1
metadata: {{name: asking}}
steps:
  name: {{}}
  ask: {{kind: http, url: "{service.url}/{{kind}}/{{name}}", needs: [name]}}
  take: {{needs: [ask], when: inputs.ask.status == 200}}
""",
        encoding="utf-8",
    )
    dag = ks.load(path, functions={"name": lambda: "x", "take": lambda ask: ask["body"]})
    async with world.engine() as engine:
        run = await engine.start(dag, kind="a")
        assert await run.result(60) == {"take": {"n": 1}}
