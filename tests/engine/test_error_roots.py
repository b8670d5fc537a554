"""The class of a recorded error has one dependable form, and the error behind a failed child is at hand."""

import pytest

import keepstep as ks
from keepstep.kernel.stored_errors import name_of
from keepstep.model import ErrorInfo


class Fail(Exception):
    pass


AS_PROGRAM = type("Fail", (Exception,), {"__module__": "__main__"})
IN_SHOP = type("Fail", (Exception,), {"__module__": "shop"})
ELSEWHERE = type("Fail", (Exception,), {"__module__": "other"})


@pytest.mark.parametrize("raised", [AS_PROGRAM, IN_SHOP])
def test_class_is_recognised_whoever_drove_the_run(raised):
    error = ErrorInfo(name_of(raised), "no")
    assert error.name == "Fail"
    for kind in ("Fail", "shop.Fail", IN_SHOP, AS_PROGRAM):
        assert error.is_a(kind)
    for kind in ("shop.Failure", "il", ValueError, ""):
        assert not error.is_a(kind)


def test_class_of_another_module_is_another():
    assert not ErrorInfo(name_of(IN_SHOP), "no").is_a(ELSEWHERE)
    assert not ErrorInfo(name_of(IN_SHOP), "no").is_a("other.Fail")


def test_errors_of_keepstep_have_the_names_that_users_write():
    error = ErrorInfo(name_of(ks.Permanent), "no")
    assert error.name == "Permanent"
    for kind in ("Permanent", "keepstep.Permanent", "keepstep.errors.Permanent", ks.Permanent):
        assert error.is_a(kind)
    assert ErrorInfo("keepstep.TimedOut", "late").is_a(ks.TimedOut)
    assert ErrorInfo("ValueError", "no").is_a(ValueError)


def failing(form):
    @ks.step
    async def bad():
        raise Fail("boom")

    if form == "graph":
        graph = ks.Graph("failing")

        async def node(state):
            raise Fail("boom")

        graph.add(node, name="bad")
        graph.entry("bad")
        graph.exit("bad")
        return graph

    if form == "waiting graph":
        graph = ks.Graph("failing")

        async def code(state):
            raise Fail("boom")

        graph.add(code, name="bad", waits=True)
        graph.entry("bad")
        graph.exit("bad")
        return graph

    @ks.workflow(name="failing")
    async def code():
        if form == "code":
            raise Fail("boom")
        return await bad()

    return code


@pytest.mark.parametrize("form", ["step", "code", "graph", "waiting graph"])
async def test_root_of_a_failed_child_is_the_error_behind_it(world, form):
    kid = failing(form)

    @ks.workflow
    async def middle():
        return await (await ks.start(kid, *([{}] if "graph" in form else [])))

    @ks.workflow
    async def top():
        try:
            await (await ks.start(middle))
        except ks.StepFailed as failure:
            await ks.sleep(0)
            return [failure.root.name, failure.root.message, failure.root.is_a(Fail)]

    async with world.engine() as engine:
        assert await (await engine.start(top, run_id="t")).result(30) == ["Fail", "boom", True]
        [stopped] = (await engine.list(parent="t")).runs
        with pytest.raises(ks.RunFailed) as caught:
            await (await engine.get(stopped.id)).result(30)
        assert (caught.value.root.name, caught.value.root.message) == ("Fail", "boom")
        assert caught.value.error.name == "StepFailed"


async def test_root_of_a_failed_step_is_its_own_error(world):
    @ks.step
    async def bad():
        raise Fail("boom")

    @ks.workflow
    async def program():
        await bad()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed) as caught:
            await (await engine.start(program)).result(30)
        assert caught.value.root.is_a(Fail)
        assert caught.value.root.traceback
