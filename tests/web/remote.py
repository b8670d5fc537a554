"""A client that steers runs over HTTP with the verbs of a handle, for tests that both must pass."""

import asyncio
import time

import keepstep as ks
from keepstep.model import Status

#: What a problem is, as the error of a handle.
ERRORS = {
    "keepstep:finished": ks.AlreadyFinished,
    "keepstep:not-found": ks.RunNotFound,
    "keepstep:conflict": ks.RunConflict,
}
PATIENCE = 30.0


class Remote:
    """A handle on a run that knows nothing but the API."""

    def __init__(self, client, run_id):
        self.client, self.id = client, run_id

    async def _call(self, method, path, **options):
        answer = await self.client.request(method, path, **options)
        if answer.status_code >= 400:
            problem = answer.json()
            raise ERRORS.get(problem["type"], ks.DefinitionError)(problem["detail"])
        return answer.json()

    async def _act(self, act, **body):
        given = {name: value for name, value in body.items() if value is not None}
        return await self._call("POST", f"/runs/{self.id}/{act}", json=given)

    async def facts(self):
        return await self._call("GET", f"/runs/{self.id}")

    async def status(self):
        return Status((await self.facts())["status"])

    async def reached(self, *statuses):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if (status := await self.status()) in statuses:
                return status
            await asyncio.sleep(0.005)
        raise AssertionError(f"{self.id} never became {statuses}")

    async def result(self):
        await self.reached(Status.COMPLETED)
        return (await self.facts())["result"]

    async def steps(self):
        records = (await self._call("GET", f"/runs/{self.id}/records"))["records"]
        return [one["step"] for one in records if one["kind"] == "step completed"]

    async def actors(self):
        entries = (await self._call("GET", f"/runs/{self.id}/audit"))["entries"]
        return {(entry["actor"], entry["reason"]) for entry in entries}

    async def signal(self, name, payload=True, id=""):  # noqa: A002 - as of a handle
        await self._act("signal", name=name, payload=payload, id=id)

    async def ask(self, name, payload=None):
        return (await self._act("ask", name=name, payload=payload))["reply"]

    async def pause(self, reason=""):
        await self._act("pause", reason=reason)

    async def resume(self, reason=""):
        await self._act("resume", reason=reason)

    async def cancel(self, reason=""):
        await self._act("cancel", reason=reason)

    async def retry(self, reason=""):
        await self._act("retry", reason=reason)

    async def rewind(self, step, reason="", dry_run=False):
        return (await self._act("rewind", step=step, reason=reason, dry_run=dry_run))["again"]

    async def fork(self, step, results, reason=""):
        made = await self._act("fork", step=step, results=results, reason=reason)
        return Remote(self.client, made["run"])

    async def edit(self, values, next_step=None, reason=""):
        await self._act("edit", values=values, next=next_step, reason=reason)

    async def state(self):
        return (await self._call("GET", f"/runs/{self.id}/state"))["state"]

    async def resolve(self, step, verdict, value=None, reason=""):
        await self._act("resolve", step=step, verdict=verdict, value=value, reason=reason)

    async def skip(self, reason=""):
        return (await self._act("skip", reason=reason))["skipped"]

    async def complete(self, token, value):
        await self._call("POST", f"/callbacks/{token}", json={"value": value})


class Local:
    """The same verbs on a handle in this process."""

    def __init__(self, engine, run_id):
        self.engine, self.id = engine, run_id

    async def handle(self):
        return (await self.engine.get(self.id)).by("web")

    async def status(self):
        return await (await self.handle()).status()

    async def reached(self, *statuses):
        async with asyncio.timeout(PATIENCE):
            return await (await self.handle()).reached(*statuses)

    async def result(self):
        return await (await self.handle()).result(PATIENCE)

    async def steps(self):
        return [one.step for one in await (await self.handle()).checkpoints() if one.kind == "step completed"]

    async def actors(self):
        return {(entry.actor, entry.reason) for entry in await (await self.handle()).audit()}

    async def signal(self, name, payload=True, id=""):  # noqa: A002 - as of a handle
        await (await self.handle()).signal(name, payload, id=id)

    async def ask(self, name, payload=None):
        return await (await self.handle()).ask(name, payload)

    async def pause(self, reason=""):
        await (await self.handle()).pause(reason)

    async def resume(self, reason=""):
        await (await self.handle()).resume(reason)

    async def cancel(self, reason=""):
        await (await self.handle()).cancel(reason)

    async def retry(self, reason=""):
        await (await self.handle()).retry(reason)

    async def rewind(self, step, reason="", dry_run=False):
        return list((await (await self.handle()).rewind(step=step, reason=reason, dry_run=dry_run)).again)

    async def fork(self, step, results, reason=""):
        made = await self.engine.fork(self.id, step=step, results=results, reason=reason, actor="web")
        return Local(self.engine, made.id)

    async def edit(self, values, next_step=None, reason=""):
        await (await self.handle()).edit(values, next=next_step, reason=reason)

    async def state(self):
        return dict(await (await self.handle()).state())

    async def resolve(self, step, verdict, value=None, reason=""):
        await (await self.handle()).resolve(f"{step}#1", verdict, value, reason)

    async def skip(self, reason=""):
        return await (await self.handle()).skip(reason=reason)

    async def complete(self, token, value):
        await self.engine.complete(token, value)
