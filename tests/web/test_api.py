"""The API shows and steers runs: every verb of a handle that is safe from outside, held by what the store says."""

import json
from contextlib import asynccontextmanager

import httpx
import pytest

import keepstep as ks
from keepstep.web import app, guard
from keepstep.web.routes import Role
from keepstep.web.tokens import Token
from tests.engine.world import until_status


@asynccontextmanager
async def client_of(engine, token=None, **options):
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    transport = httpx.ASGITransport(app(engine, **options), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1", headers=headers) as client:
        yield client


@ks.step
async def double(number):
    return number * 2


def approving():
    @ks.workflow(name="approving")
    async def program(number: int = 1):
        ks.publish("question", f"double {number}?")
        if not await ks.wait_for("approved"):
            return "denied"
        return await double(number)

    return program


async def waiting(engine, **options):
    run = await engine.start(approving(), 21, run_id="r", **options)
    await until_status(run, "waiting")
    return run


async def test_runs_are_listed_page_by_page(world):
    async with world.engine() as engine, client_of(engine) as client:
        for number in range(5):
            await engine.start(approving(), number, run_id=f"r{number}", tags={"odd": str(number % 2)})
        first = (await client.get("/runs", params={"limit": 3})).json()
        assert [run["id"] for run in first["runs"]] == ["r4", "r3", "r2"]
        second = (await client.get("/runs", params={"limit": 3, "after": first["next"]})).json()
        assert [run["id"] for run in second["runs"]] == ["r1", "r0"]
        odd = (await client.get("/runs", params={"tag": "odd=1"})).json()
        assert [run["id"] for run in odd["runs"]] == ["r3", "r1"]
        none = (await client.get("/runs", params={"status": ["failed", "cancelled"]})).json()
        assert none["runs"] == []


async def test_run_tells_what_it_waits_for_and_what_can_be_done(world):
    async with world.engine() as engine, client_of(engine) as client:
        await waiting(engine)
        run = (await client.get("/runs/r")).json()
        assert run["status"] == "waiting"
        assert run["input"] == {"args": [21], "kwargs": {}}
        assert run["published"] == {"question": "double 21?"}
        assert [wait["name"] for wait in run["waits"] if wait["kind"] == "signal"] == ["approved"]
        assert run["actions"] == [{"act": "approve", "run": "r", "name": "approved"}]


async def test_approval_lets_the_run_go_on(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        answer = await client.post("/runs/r/approve", json={}, headers={"x-keepstep-actor": "ann"})
        assert (answer.status_code, answer.json()) == (202, {"run": "r", "act": "approve"})
        assert await run.result(30) == 42
        audit = (await client.get("/runs/r/audit")).json()
        assert any(entry["actor"] == "ann (web)" for entry in audit["entries"])
        again = await client.post("/runs/r/approve", json={"name": "approved"})
        assert (again.status_code, again.json()["type"]) == (409, "keepstep:finished")


async def test_denial_is_an_answer_too(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        await client.post("/runs/r/deny", json={"name": "approved"})
        assert await run.result(30) == "denied"


async def test_act_on_a_run_that_has_moved_on_is_refused(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        seq = (await run.run()).seq
        stale = await client.post("/runs/r/approve", json={"seq": seq - 1})
        assert (stale.status_code, stale.json()["type"]) == (409, "keepstep:moved")
        assert (await client.post("/runs/r/approve", json={"seq": seq})).status_code == 202
        assert await run.result(30) == 42


async def test_records_come_in_pages_without_values_unless_asked(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        await run.signal("approved")
        await run.result(30)
        found, after = [], 0
        while after is not None:
            page = (await client.get("/runs/r/records", params={"after": after, "limit": 2})).json()
            found += page["records"]
            after = page["next"]
        assert [one["seq"] for one in found] == [one.seq for one in await run.checkpoints()]
        assert all("value" not in one for one in found)
        whole = (await client.get("/runs/r/records", params={"values": "true"})).json()["records"]
        done = next(one for one in whole if one["step"] == "double#1")
        assert done["value"] == 42
        assert (await client.get(f"/runs/r/records/{done['seq']}")).json()["value"] == 42
        assert (await client.get("/runs/r/records/999")).status_code == 404


async def test_runs_are_started_paused_resumed_and_cancelled(world):
    program = approving()
    async with world.engine() as engine, client_of(engine) as client:
        body = {"workflow": program.name, "kwargs": {"number": 4}, "run_id": "s", "tags": {"a": "b"}}
        made = await client.post("/runs", json=body)
        assert (made.status_code, made.json()["id"], made.json()["tags"]) == (201, "s", {"a": "b"})
        run = await engine.get("s")
        await until_status(run, "waiting")
        await client.post("/runs/s/pause", json={"reason": "lunch"})
        await until_status(run, "paused")
        await client.post("/runs/s/resume", json={})
        await until_status(run, "waiting")
        await client.post("/runs/s/cancel", json={"reason": "no need"})
        await until_status(run, "cancelled")
        assert (await client.get("/runs/s")).json()["cancelled"]["reason"] == "no need"


async def test_failed_run_is_retried_rewound_and_forked(world):
    fails = [True]

    @ks.step
    async def work(number):
        if fails:
            raise ValueError("broken")
        return number

    @ks.workflow
    async def program():
        return await double(3) + await work(1)

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(program, run_id="r")
        await until_status(run, "failed")
        error = (await client.get("/runs/r")).json()["error"]
        assert "broken" in error["message"]
        fails.clear()
        assert (await client.post("/runs/r/retry", json={"reason": "mended"})).status_code == 202
        assert await (await engine.get("r")).result(30) == 7
        dry = (await client.post("/runs/r/rewind", json={"step": "double", "dry_run": True})).json()
        assert "double#1" in dry["again"]
        forked = await client.post("/runs/r/fork", json={"step": "work", "results": {"double#1": 100}})
        assert forked.status_code == 201
        assert await (await engine.get(forked.json()["run"])).result(30) == 101
        both = (await client.get("/runs/r/diff", params={"other": forked.json()["run"]})).json()
        assert "double#1" in both["changed"]


async def test_events_go_on_after_the_last_one_seen(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        await run.signal("approved")
        await run.result(30)

        async def stream(headers):
            async with client.stream("GET", "/runs/r/events", headers=headers) as answer:
                return [int(line[4:]) async for line in answer.aiter_lines() if line.startswith("id: ")]

        everything = await stream({})
        assert everything == [one.seq for one in await run.checkpoints()]
        assert await stream({"last-event-id": str(everything[2])}) == everything[3:]


async def test_question_is_answered(world):
    @ks.workflow
    async def program():
        request = await ks.wait_for("question")
        request.reply(request.payload * 2)

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(program, run_id="r")
        answer = await client.post("/runs/r/ask", json={"name": "question", "payload": 4})
        assert answer.json() == {"run": "r", "reply": 8}
        await run.result(30)


async def test_callback_is_completed_by_its_token_alone(world):
    given = []

    @ks.workflow
    async def program():
        callback = await ks.callback("paid")
        given.append(callback.token)
        return await callback.wait()

    token = "a secret of sixteen characters"
    async with world.engine() as engine, client_of(engine, tokens=[token]) as client:
        run = await engine.start(program, run_id="r")
        await until_status(run, "waiting")
        assert (await client.post(f"/callbacks/{given[-1]}", json={"value": 5})).status_code == 202
        assert await run.result(30) == 5
        assert (await client.post("/callbacks/nonsense", json={})).status_code == 404


@pytest.mark.one_store
async def test_reader_sees_no_secret_of_a_callback(world):
    given = []

    @ks.workflow
    async def program():
        callback = await ks.callback("paid")
        given.append(callback.token)
        return await callback.wait()

    tokens = ["ann:read:" + "a" * 20, "ben:act:" + "b" * 20]
    async with world.engine() as engine:
        for run_id in ("r", "s"):
            await until_status(await engine.start(program, run_id=run_id), "waiting")
        secret = given[-1].partition(".")[0].removeprefix("cb_")
        paths = ("/runs/s/records?values=true", "/runs/s/records/2", "/runs/s/records/2/raw", "/runs/r/diff?other=s")
        pages = ("/runs/s/travel?at=2", "/compare?a=r&b=s")
        for token, sees in (("a" * 20, False), ("b" * 20, True)):
            async with client_of(engine, token, tokens=tokens) as client:
                texts = [(await client.get(path)).text for path in paths]
                texts += [(await client.get(f"http://localhost{path}")).text for path in pages]
                assert [secret in text for text in texts] == [sees] * len(texts)


@pytest.mark.one_store
async def test_payloads_of_signals_need_the_role_act(world):
    tokens = ["ann:read:" + "a" * 20, "ben:act:" + "b" * 20]
    async with world.engine() as engine:
        run = await waiting(engine)
        await run.signal("later", "a payload")
        for token, status in (("a" * 20, 403), ("b" * 20, 200)):
            async with client_of(engine, token, tokens=tokens) as client:
                assert (await client.get("/runs/r/signals")).status_code == 200
                assert (await client.get("/runs/r/signals?values=true")).status_code == status


async def test_queues_services_schedules_workers_and_doctor_are_shown(world):
    ks.Queue("mail", concurrency=2)
    ks.Service("bank", concurrency=1, breaker=ks.Breaker())
    async with world.engine() as engine, client_of(engine) as client:
        changed = await client.post("/queues/mail/set", json={"limits": {"concurrency": 5}, "reason": "more"})
        assert changed.json()["limits"]["concurrency"] == 5
        assert changed.json()["log"][-1]["actor"] == "web"
        rated = {"limits": {"rate": {"count": 5, "per": 1.0}}}
        assert (await client.post("/queues/mail/set", json=rated)).json()["limits"]["rate"]["count"] == 5
        assert (await client.post("/queues/mail/reset", json={})).json()["limits"]["concurrency"] == 2
        assert (await client.post("/services/bank/open", json={})).json()["breaker"]["status"] == "open"
        assert (await client.post("/services/bank/close", json={})).json()["breaker"]["status"] == "closed"
        for path in ("queues", "services", "schedules", "channels", "workers", "doctor", "top", "workflows", "aside"):
            answer = await client.get(f"/{path}")
            assert answer.status_code == 200, (path, answer.text)
        assert (await client.post("/workers/nobody/drain", json={})).status_code == 404


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize(
    "request_, status, detail",
    [
        (("GET", "/runs?limit=0", None), 422, "limit"),
        (("GET", "/runs?colour=red", None), 422, "unknown parameter 'colour'"),
        (("GET", "/runs?status=happy", None), 422, "happy"),
        (("GET", "/runs?tag=a", None), 422, "NAME=VALUE"),
        (("GET", "/runs?created_after=2026-01-01T00:00:00", None), 422, "time zone"),
        (("GET", "/runs/nobody", None), 404, "no run 'nobody'"),
        (("POST", "/runs/nobody/cancel", {}), 404, "no run 'nobody'"),
        (("POST", "/runs", {"workflow": "unknown"}), 422, "unknown"),
        (("POST", "/runs", {"workflow": "approving", "kwargs": {"run_id": 1}}), 422, "run_id"),
        (("POST", "/runs/r/signal", {"payload": 1}), 422, "name"),
        (("POST", "/runs/r/cancel", {"why": "x"}), 422, "why"),
        (("POST", "/runs", {"workflow": "approving", "deadline": "0001-01-01T00:00:00+23:00"}), 422, "deadline"),
        (("POST", "/runs", {"workflow": "approving", "deadline": "9999-12-31T23:59:59-23:59"}), 422, "deadline"),
        (("GET", "/runs/r/records/" + "9" * 5000, None), 422, "number"),
        (("GET", "/runs/r/records/0", None), 422, "number"),
        (("POST", "/runs", {"workflow": "approving", "tags": {f"t{n}": "" for n in range(101)}}), 422, "100 tags"),
        (("GET", "/nowhere", None), 404, "Not Found"),
        (("DELETE", "/runs/r", None), 405, "Not Allowed"),
    ],
)
async def test_bad_input_gets_a_clear_problem(world, request_, status, detail):
    method, path, body = request_
    async with world.engine(workflows=[approving()]) as engine, client_of(engine) as client:
        answer = await client.request(method, path, json=body)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert detail in answer.json()["detail"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_body_that_is_not_json_is_refused(world):
    async with world.engine() as engine, client_of(engine) as client:
        answer = await client.post("/runs/r/cancel", content=b"{")
        assert (answer.status_code, answer.json()["type"]) == (422, "keepstep:unfit")


# -- safety ------------------------------------------------------------------------------------------------------------


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 404),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1:8080"}, 404),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost"}, 404),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost"}, 404),
        ({"sec-fetch-site": "none"}, 404),
        ({"sec-fetch-site": "none", "origin": "http://evil.example"}, 403),
        ({"origin": "http://["}, 403),
        ({"host": "[::1]:8080"}, 404),
        ({"host": "[::1]evil"}, 421),
        ({"host": "localhost:evil"}, 421),
    ],
)
async def test_changes_come_only_from_this_site(world, headers, status):
    async with world.engine() as engine, client_of(engine) as client:
        assert (await client.post("/runs/nobody/cancel", json={}, headers=headers)).status_code == status


@pytest.mark.one_store
@pytest.mark.live_only
async def test_token_decides_what_a_caller_may_do(world):
    tokens = [Token("r" * 20, Role.READ, "reader"), "ann:act:" + "a" * 20, Token("x" * 20, Role.ADMIN, "root")]
    async with world.engine() as engine:
        await waiting(engine)
        expected = {
            None: (401, 401, 401),
            "r" * 20: (200, 403, 403),
            "a" * 20: (200, 202, 403),
            "x" * 20: (200, 202, 202),
        }
        for token, statuses in expected.items():
            async with client_of(engine, token, tokens=tokens) as client:
                got = [
                    (await client.get("/runs/r")).status_code,
                    (await client.post("/runs/r/signal", json={"name": "other"})).status_code,
                    (await client.post("/runs/r/cancel", json={})).status_code,
                ]
            assert tuple(got) == statuses, token


@pytest.mark.one_store
@pytest.mark.live_only
async def test_read_only_server_changes_nothing(world):
    async with world.engine() as engine, client_of(engine, read_only=True) as client:
        run = await waiting(engine)
        before = (await run.run()).signals
        answer = await client.post("/runs/r/approve", json={})
        assert (answer.status_code, answer.json()["type"]) == (403, "keepstep:read-only")
        assert (await run.run()).signals == before


@pytest.mark.parametrize("text", ["short", "boss:" + "a" * 20])
def test_weak_or_unknown_token_is_refused(text):
    with pytest.raises(ks.DefinitionError, match="a token"):
        Token.parse(text)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_responses_carry_headers_that_browsers_obey(world):
    async with world.engine() as engine, client_of(engine) as client:
        headers = (await client.get("/runs")).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


@pytest.mark.one_store
@pytest.mark.live_only
async def test_description_names_every_route_once(world):
    async with world.engine() as engine, client_of(engine) as client:
        found = (await client.get("http://localhost/openapi.json")).json()
        operations = [one["operationId"] for path in found["paths"].values() for one in path.values()]
        assert len(operations) == len(set(operations)) > 40
        assert found["openapi"] == "3.1.0"
        assert "Problem" in found["components"]["schemas"]
        json.dumps(found)


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize("name", ["static", "healthz", "login"])
async def test_name_of_a_run_decides_nothing_about_its_caller(world, name):
    async with world.engine() as engine:
        await engine.start(approving(), run_id=name, delay=60)
        async with client_of(engine) as client:
            assert (await client.get(f"/runs/{name}")).status_code == 200
        async with client_of(engine, read_only=True) as client:
            assert (await client.post(f"/runs/{name}/cancel", json={})).status_code == 403
            assert (await client.post(f"/callbacks/{name}", json={})).status_code == 403


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize("length", ["5", "many"])
async def test_body_is_limited_whatever_its_length_is_said_to_be(world, length, monkeypatch):
    monkeypatch.setattr(guard, "MOST_BYTES", 100)
    async with world.engine() as engine, client_of(engine) as client:
        answer = await client.post("/runs/r/cancel", content=b" " * 200, headers={"content-length": length})
        assert (answer.status_code, answer.json()["type"]) == (413, "keepstep:too-large")


@pytest.mark.one_store
@pytest.mark.live_only
async def test_health_is_told_without_a_token(world):
    async with world.engine() as engine, client_of(engine, tokens=["t" * 20]) as client:
        assert (await client.get("http://localhost/healthz")).status_code == 200
        assert (await client.get("http://localhost/readyz")).status_code == 200


async def test_many_runs_are_counted_and_then_cancelled(world):
    async with world.engine() as engine, client_of(engine) as client:
        for number in range(3):
            await until_status(await engine.start(approving(), number, run_id=f"m{number}"), "waiting")
        await engine.start(approving(), run_id="other")
        body = {"filter": {"id_prefix": "m"}, "reason": "no longer needed"}
        counted = (await client.post("/many/cancel", json=body)).json()
        assert (counted["matched"], counted["changed"], counted["dry_run"]) == (3, 0, True)
        done = (await client.post("/many/cancel", json=body | {"dry_run": False})).json()
        assert done["changed"] + done["asked"] == 3
        for number in range(3):
            await until_status(await engine.get(f"m{number}"), "cancelled")
        assert (await (await engine.get("other")).run()).status.value != "cancelled"
        unfit = {"filter": {"id_prefix": "other", "status": ["waiting"]}, "dry_run": False}
        nothing = (await client.post("/many/retry", json=unfit)).json()
        assert (nothing["matched"], nothing["changed"]) == (0, 0)
        neither = await client.post("/many/cancel", json={"dry_run": False})
        assert (neither.status_code, neither.json()["type"]) == (422, "keepstep:unfit")
