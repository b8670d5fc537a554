"""The annotations of a workflow hold for its arguments, wherever they come from, and for its result."""

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TypedDict

import msgspec
import pydantic
import pytest

import keepstep as ks
from tests.engine.world import until_status


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Item:
    name: str
    count: int = 1


class Order(pydantic.BaseModel):
    amount: int
    items: list[Item] = []
    token: str = pydantic.Field(default_factory=lambda: uuid.uuid4().hex)

    @pydantic.field_validator("amount")
    @classmethod
    def positive(cls, amount):
        if amount < 0:
            raise ValueError("must not be negative")
        return amount


class Parcel(msgspec.Struct):
    weight: float
    fragile: bool = False


class Place(TypedDict):
    town: str


@dataclass
class Verdict:
    score: float
    notes: list[str] = field(default_factory=list)


@ks.step
async def look(shown: str):
    return shown


def taking(hint):
    async def take(value):
        return [type(value).__name__, await look(repr(value))]

    take.__annotations__ = {"value": hint}
    return ks.workflow(name="take")(take)


WHEN = datetime(2026, 1, 2, tzinfo=UTC)
CONVERTED = [
    (Order, {"amount": "4", "token": "t"}, Order(amount=4, token="t")),
    (Item, {"name": "pen"}, Item("pen")),
    (list[Item], [{"name": "pen"}, Item("ink", 2)], [Item("pen"), Item("ink", 2)]),
    (Parcel, {"weight": 2}, Parcel(2.0)),
    (Place, {"town": "Ulm", "more": 1}, {"town": "Ulm", "more": 1}),
    (Size, "l", Size.LARGE),
    (datetime, "2026-01-02T00:00:00Z", WHEN),
    (uuid.UUID, "12345678-1234-5678-1234-567812345678", uuid.UUID("12345678-1234-5678-1234-567812345678")),
    (Path, "notes.txt", Path("notes.txt")),
    (Order | None, None, None),
    (Order | str, {"amount": 1, "token": "t"}, Order(amount=1, token="t")),
    (Item | None, {"name": "pen"}, Item("pen")),
    (float, 3, 3.0),
    (dict[str, Item], {"a": {"name": "pen"}}, {"a": Item("pen")}),
]


@pytest.mark.parametrize("hint, given, made", CONVERTED, ids=[str(one[0]) for one in CONVERTED])
async def test_plain_data_becomes_the_type_of_the_parameter(world, hint, given, made):
    async with world.engine() as engine:
        for value in (given, made):  # an instance stays as it is
            run = await engine.start(taking(hint), value)
            assert await run.result(60) == [type(made).__name__, repr(made)]
            assert (await run.input())[0] == [made]


REFUSED = [
    (Order, {"amount": -1}, "does not fit Order: ['amount'] Value error, must not be negative"),
    (Order, {}, "['amount'] Field required"),
    (list[Item], [{"name": 3}], "Expected `str`, got `int` - at `$[0].name`"),
    (int, "3", "Expected `int`, got `str`"),
    (Size, "LARGE", "Invalid enum value 'LARGE'"),
    (Place, {}, "missing required field `town`"),
    (Parcel, {"weight": 1, "fragile": "no"}, "Expected `bool`, got `str`"),
]


@pytest.mark.parametrize("hint, given, problem", REFUSED, ids=[str(one[0]) for one in REFUSED])
async def test_argument_that_does_not_fit_is_refused_before_anything_is_stored(world, hint, given, problem):
    async with world.engine() as engine:
        with pytest.raises(ks.DefinitionError) as refused:
            await engine.start(taking(hint), given)
        assert str(refused.value).startswith("argument 'value' of workflow 'take' does not fit ")
        assert problem in str(refused.value)
        assert "errors.pydantic.dev" not in str(refused.value)
        assert not (await engine.list()).runs


@ks.workflow
async def several(first, second: Size = Size.SMALL, *rest: Item, third: float = 0.5, **more: Item):
    return [await look(repr(one)) for one in (first, second, rest, third, more)]


async def test_every_kind_of_parameter_has_its_type_and_others_take_anything(world):
    async with world.engine() as engine:
        run = await engine.start(several, {"a": 1}, "l", {"name": "x"}, third=2, y={"name": "y"})
        assert await run.result(60) == [
            "{'a': 1}", "<Size.LARGE: 'l'>", "(Item(name='x', count=1),)", "2.0", "{'y': Item(name='y', count=1)}",
        ]  # fmt: skip
        assert await (await engine.start(several, None)).result(60) == [
            "None", "<Size.SMALL: 's'>", "()", "0.5", "{}",
        ]  # fmt: skip
        with pytest.raises(ks.DefinitionError, match="argument 'y' of workflow 'several'"):
            await engine.start(several, 1, y={"nam": 1})


async def test_annotation_that_cannot_be_checked_takes_anything(world):
    @ks.workflow
    async def loose(one: "Unknown", two: Item | Parcel, three: "ks.Call[int]" = None):  # noqa: F821
        return [one, two]

    async with world.engine() as engine:
        assert await (await engine.start(loose, 1, {"name": "pen"})).result(60) == [1, {"name": "pen"}]


# -- the same start again ----------------------------------------------------------------------------------------------


async def test_same_start_again_is_the_same_run_even_with_a_default_made_anew(world):
    take = taking(Order)
    async with world.engine() as engine:
        first = await engine.start(take, {"amount": 1}, run_id="r")
        assert (await engine.start(take, {"amount": 1}, run_id="r")).id == first.id
        with pytest.raises(ks.RunConflict):
            await engine.start(take, {"amount": 2}, run_id="r")
        with pytest.raises(ks.RunConflict):
            await engine.start(take, Order(amount=1, token="other"), run_id="r")
        await first.result(60)


# -- children and called workflows -------------------------------------------------------------------------------------


@ks.workflow
async def rate(order: Order) -> Verdict:
    return {"score": order.amount, "notes": [type(order).__name__]}


@ks.workflow
async def misrate(order: Order) -> Verdict:
    await look(repr(order))
    return {"notes": []}


async def test_child_gets_and_returns_the_annotated_types(world):
    @ks.workflow
    async def parent() -> list[Verdict]:
        one = await (await ks.start(rate, {"amount": 1})).result()
        two, three = await ks.gather(rate({"amount": 2}), rate(Order(amount=3, token="t")))
        child = await ks.start(rate, {"amount": 4})
        return [one, two, three, await child.result()]

    async with world.engine() as engine:
        run = await engine.start(parent)
        assert await run.result(60) == [Verdict(float(n), ["Order"]) for n in (1, 2, 3, 4)]
        assert await (await engine.start(rate, {"amount": 5})).result(60) == Verdict(5.0, ["Order"])


async def test_argument_of_a_child_or_called_workflow_that_does_not_fit_is_refused(world):
    @ks.workflow
    async def parent(called: bool) -> str:
        try:
            await (rate({"amount": "x"}) if called else ks.start(rate, {"amount": "x"}))
        except ks.DefinitionError as error:
            return str(error)

    async with world.engine() as engine:
        for called in (True, False):
            problem = await (await engine.start(parent, called)).result(60)
            assert problem.startswith("argument 'order' of workflow 'rate' does not fit Order: ['amount']")


async def test_result_that_does_not_fit_fails_the_run_or_the_call(world):
    @ks.workflow
    async def parent() -> str:
        try:
            await misrate({"amount": 1, "token": "t"})  # a default from a factory would differ on a replay
        except ks.DefinitionError as error:
            return str(error)

    problem = "the result of workflow 'misrate' does not fit Verdict: Object missing required field `score`"
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=problem):
            await (await engine.start(misrate, {"amount": 1})).result(60)
        assert problem in await (await engine.start(parent)).result(60)


async def test_child_with_a_default_from_a_factory_is_replayed(world):
    """The key of the child is that of what its parent gave, which is the same each time."""

    @ks.workflow
    async def parent() -> float:
        verdict = await (await ks.start(rate, {"amount": 1})).result()
        await ks.wait_for("go")
        return verdict.score

    async with world.engine(workflows=[parent, rate]) as engine:
        await engine.start(parent, run_id="p")
        await until_status(await engine.get("p"), "waiting")
    async with world.engine(workflows=[parent, rate]) as engine:
        run = await engine.get("p")
        await run.signal("go")
        assert await run.result(60) == 1.0


async def test_successor_gets_the_annotated_type(world):
    @ks.workflow
    async def loop(order: Order) -> int:
        if order.amount < 3:
            ks.continue_as({"amount": order.amount + 1})
        return order.amount

    async with world.engine() as engine:
        assert await (await engine.start(loop, {"amount": 1})).result(60) == 3


async def test_fork_with_other_input_is_converted_or_refused(world):
    take = taking(Item)
    async with world.engine(workflows=[take]) as engine:
        run = await engine.start(take, {"name": "pen"})
        await run.result(60)
        fork = await engine.fork(run.id, 0, input={"value": {"name": "ink"}})
        assert await fork.result(60) == ["Item", "Item(name='ink', count=1)"]
        with pytest.raises(ks.DefinitionError, match="argument 'value' of workflow 'take'"):
            await engine.fork(run.id, 0, input={"value": {"nam": "ink"}})


async def test_fork_without_the_code_is_converted_by_the_worker_or_set_aside(world):
    take = taking(Item)
    async with world.engine(workflows=[take]) as engine:
        await (await engine.start(take, {"name": "pen"}, run_id="r")).result(60)
    async with world.engine(workflows=[], worker=False) as stranger:
        await stranger.fork("r", 0, input={"value": {"name": "ink"}}, run_id="good")
        await stranger.fork("r", 0, input={"value": {"nam": "ink"}}, run_id="bad")
    async with world.engine(workflows=[take]) as engine:
        assert await (await engine.get("good")).result(60) == ["Item", "Item(name='ink', count=1)"]
        with pytest.raises(ks.RunSetAside, match=r"does not fit Item.*fork the run with an input that fits"):
            await (await engine.get("bad")).result(60)


# -- dags --------------------------------------------------------------------------------------------------------------


async def test_inputs_of_a_dag_have_the_types_of_its_steps(world):
    dag = ks.Dag("shop")

    @dag.step
    async def weigh(order: Order, size: Size = Size.SMALL):
        return [type(order).__name__, size.name]

    @dag.step(map="item", needs=["weigh"])
    async def pack(item: Item, weigh):
        return [type(item).__name__, item.count, *weigh]

    async with world.engine() as engine:
        run = await engine.start(dag, order={"amount": 1}, size="l", item=[{"name": "pen"}])
        assert await run.result(60) == {"pack": [["Item", 1, "Order", "LARGE"]]}
        with pytest.raises(ks.DefinitionError, match=r"argument 'item' of workflow 'shop'.*Expected `array`"):
            await engine.start(dag, order={"amount": 1}, item={"name": "pen"})


async def test_child_of_a_dag_gets_the_annotated_type(world):
    dag = ks.Dag("judge")

    @dag.step
    async def order(amount: int):
        return {"amount": amount}

    dag.add(rate, needs=["order"])
    async with world.engine() as engine:
        assert await (await engine.start(dag, amount=2)).result(60) == {"rate": Verdict(2.0, ["Order"])}


# -- graphs ------------------------------------------------------------------------------------------------------------


def essay(**options):
    graph = ks.Graph("essay", **options)

    @graph.step
    async def rate(state):
        return {"score": state.score + 1, "notes": ["rated"]}

    graph.entry("rate")
    graph.exit("rate")
    return graph


@dataclass
class Summary:
    score: float


@dataclass
class Whole:
    score: int


class Model(pydantic.BaseModel):
    score: float = 0.0
    notes: list[str] = pydantic.Field(default=[], alias="remarks")
    model_config = pydantic.ConfigDict(populate_by_name=True)


class Page(TypedDict):
    notes: list[str]


async def test_result_of_a_graph_is_an_instance_of_its_class(world):
    plain, typed = essay(schema=Verdict), essay(schema=Verdict, result=Verdict)
    async with world.engine(workflows=[plain]) as engine:
        assert await (await engine.start(plain, score=1)).result(60) == {"score": 2.0, "notes": ["rated"]}
    async with world.engine(workflows=[typed]) as engine:
        run = await engine.start(typed, Verdict(1.0), run_id="r")
        assert await run.result(60) == Verdict(2.0, ["rated"])
        assert await (await engine.get("r")).result(60) == Verdict(2.0, ["rated"])


@pytest.mark.parametrize(
    "cls, made", [(Model, Model(score=2, notes=["rated"])), (Page, {"notes": ["rated"]}), (Summary, Summary(2))]
)
async def test_result_of_a_graph_takes_the_keys_that_its_class_names(world, cls, made):
    graph = essay(result=cls)
    async with world.engine(workflows=[graph]) as engine:
        assert await (await engine.start(graph, score=1)).result(60) == made


async def test_last_state_that_does_not_fit_the_result_fails_the_run(world):
    graph = essay(result=Whole)
    async with world.engine(workflows=[graph]) as engine:
        with pytest.raises(ks.RunFailed, match=r"the result of graph 'essay'.*does not fit Whole"):
            await (await engine.start(graph, score=0.5)).result(60)


async def test_graph_with_a_result_is_a_child(world):
    graph = essay(schema=Verdict, result=Summary)
    outer = ks.Graph("outer")
    outer.add(graph, takes=["score"])
    outer.entry("essay")
    outer.exit("essay")

    @ks.workflow
    async def parent() -> Summary:
        return await (await ks.start(graph, score=1)).result()

    async with world.engine(workflows=[graph, outer, parent]) as engine:
        assert await (await engine.start(parent)).result(60) == Summary(2)
        assert await (await engine.start(outer, score=3)).result(60) == {"score": 4}


def test_class_of_a_result_must_have_fields():
    with pytest.raises(ks.DefinitionError, match="result= takes a TypedDict"):
        ks.Graph("wrong", result=int)


# -- annotations that change -------------------------------------------------------------------------------------------


def waiting(hint, result=None):
    @ks.workflow(name="waiting")
    async def code(value):
        await look(repr(value))
        await ks.wait_for("go")
        return value if result is None else {"score": 1}

    code.fn.__annotations__ = {"value": hint} if result is None else {"value": hint, "return": result}
    return code


async def test_stored_argument_that_a_newer_annotation_refuses_sets_the_run_aside(world):
    before, after = waiting(str), waiting(int)
    async with world.engine(workflows=[before]) as engine:
        await until_status(await engine.start(before, "three", run_id="r"), "waiting")
    async with world.engine(workflows=[after]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        with pytest.raises(ks.RunSetAside) as aside:
            await run.result(60)
        assert "argument 'value' of workflow 'waiting' does not fit int: Expected `int`, got `str`" in str(aside.value)
        assert "Let the annotation accept the stored value and retry the run" in str(aside.value)
    async with world.engine(workflows=[before]) as engine:
        run = await engine.get("r")
        await run.retry()
        assert await run.result(60) == "three"


async def test_run_of_an_older_version_keeps_its_arguments_and_its_result(world, monkeypatch):
    from keepstep.kernel.runner import Runner

    before, after = waiting(dict), waiting(Item, Verdict)
    started = Runner.started

    def as_before(*args):
        record = started(*args)
        del record.data["typed"]
        return record

    monkeypatch.setattr(Runner, "started", staticmethod(as_before))
    async with world.engine(workflows=[before]) as engine:
        await until_status(await engine.start(before, {"name": "pen"}, run_id="r"), "waiting")
    async with world.engine(workflows=[after]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(60) == {"score": 1}
        assert await engine.start(after, {"name": "pen"}, run_id="r")  # the same run, although stored otherwise


@pytest.mark.live_only
async def test_first_record_says_that_annotations_hold(world):
    code = waiting(Item, Verdict)
    async with world.engine(workflows=[code]) as engine:
        run = await engine.start(code, {"name": "pen"})
        await until_status(run, "waiting")
        assert (await run.checkpoints())[0].data["typed"] is True
        await run.cancel()


@pytest.mark.live_only
async def test_check_before_a_deployment_finds_arguments_that_do_not_fit(world):
    from keepstep.history.compatibility import Fit, check

    before, after = waiting(str), waiting(int)
    async with world.engine(workflows=[before]) as engine:
        await until_status(await engine.start(before, "three", run_id="r"), "waiting")
        [found] = [one async for one in check(engine, {"waiting": after})]
        assert found.fit in (Fit.MISMATCH, Fit.UNREADABLE)
        assert "argument 'value' of workflow 'waiting' does not fit int" in found.why
