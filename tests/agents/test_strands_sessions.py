"""Strands keeps its sessions in the documents of a store."""

import pytest
from strands import Agent, ToolContext, tool
from strands.multiagent import GraphBuilder
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

import keepstep as ks
from keepstep.agents.strands import KeepstepSessionManager, durable
from keepstep.engine.documents import Documents
from tests.agents.test_strands import Scripted, new_agent


@pytest.fixture(params=["memory", "sqlite"])
def documents(request, tmp_path):
    with Documents.open("memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/runs.db") as found:
        yield found


def text(word):
    return {"role": "user", "content": [{"text": word}]}


async def test_conversation_goes_on_in_another_process(tmp_path, effects):
    url = f"sqlite:///{tmp_path}/runs.db"

    @tool(context=True)
    def refund(eur: int, tool_context: ToolContext) -> str:
        """Pay back."""
        tool_context.agent.state.set("asked", eur)
        return "paid" if tool_context.interrupt("approval", reason=eur) else "denied"

    def script(done):
        return "refunded" if done else [("refund", "c1", {"eur": 5})]

    with Documents.open(url) as documents:
        agent = new_agent(effects, script, [refund], session_manager=KeepstepSessionManager("s1", documents))
        [asked] = (await agent.invoke_async("money back?")).interrupts
    with Documents.open(url) as documents:
        agent = new_agent(effects, script, [refund], session_manager=KeepstepSessionManager("s1", documents))
        assert (agent.state.get("asked"), len(agent.messages)) == (5, 2)
        answer = [{"interruptResponse": {"interruptId": asked.id, "response": True}}]
        assert str(await agent.invoke_async(answer)).strip() == "refunded"
        assert [one["role"] for one in agent.messages] == ["user", "assistant", "user", "assistant"]
    assert effects == ["model c1", "model refunded"]


def test_messages_are_listed_in_order_and_pages(documents):
    session = KeepstepSessionManager("s1", documents)
    session.create_agent("s1", SessionAgent("a", {"x": 1}, {}))
    for number in range(12):
        session.create_message("s1", "a", SessionMessage.from_message(text(str(number)), number))
    session.create_message("s1", "ab", SessionMessage.from_message(text("other"), 0))
    found = [one.message["content"][0]["text"] for one in session.list_messages("s1", "a")]
    assert found == [str(number) for number in range(12)]
    assert [one.message_id for one in session.list_messages("s1", "a", limit=3, offset=9)] == [9, 10, 11]
    assert session.list_messages("s1", "a", offset=20) == []


def test_bytes_and_redaction_are_kept(documents):
    session = KeepstepSessionManager("s1", documents)
    picture = {"role": "user", "content": [{"image": {"format": "png", "source": {"bytes": b"\x00\xff"}}}]}
    session.create_message("s1", "a", SessionMessage.from_message(picture, 0))
    found = session.read_message("s1", "a", 0)
    assert found.to_message() == picture
    created, found.redact_message, found.created_at = found.created_at, text("gone"), "later"
    session.update_message("s1", "a", found)
    again = session.read_message("s1", "a", 0)
    assert (again.to_message(), again.created_at) == (text("gone"), created)


def test_what_is_missing_or_there_already_is_refused(documents):
    session = KeepstepSessionManager("s/1", documents)
    message = SessionMessage.from_message(text("hi"), 0)
    with pytest.raises(SessionException, match="session s/1 exists already"):
        session.create_session(Session("s/1", SessionType.AGENT))
    with pytest.raises(SessionException, match="agent a of session s/1 does not exist"):
        session.update_agent("s/1", SessionAgent("a", {}, {}))
    with pytest.raises(SessionException, match="message 0 of agent a does not exist"):
        session.update_message("s/1", "a", message)
    session.create_message("s/1", "a", message)
    with pytest.raises(SessionException, match="message 0 of a exists already; one process at a time"):
        session.create_message("s/1", "a", message)
    with pytest.raises(SessionException, match="JSON cannot hold it"):
        session.create_agent("s/1", SessionAgent("b", {"x": object()}, {}))
    assert session.read_agent("s/1", "b") is None


def test_deleted_session_leaves_the_others(documents):
    for name in ("s1", "s1/2", "s2"):
        KeepstepSessionManager(name, documents).create_agent(name, SessionAgent("a", {}, {}))
    session = KeepstepSessionManager("s2", documents)
    session.delete_session("s1")
    assert session.read_session("s1") is None
    assert session.read_agent("s1/2", "a") is not None
    with pytest.raises(SessionException, match="session s1 does not exist"):
        session.delete_session("s1")


async def test_graph_keeps_its_state(documents, effects):
    def build():
        graph = GraphBuilder().set_max_node_executions(9).set_graph_id("poems")
        graph.add_node(new_agent(effects, lambda _: "moon", name="moon"), "moon")
        return graph.set_session_manager(KeepstepSessionManager("s1", documents)).build()

    assert str((await build().invoke_async("rhyme")).results["moon"].result).strip() == "moon"
    assert KeepstepSessionManager("s1", documents).read_multi_agent("s1", "poems")["status"] == "completed"


def test_durable_agent_with_a_session_manager_is_refused(documents, effects):
    agent = Agent(model=Scripted(effects, None), session_manager=KeepstepSessionManager("s1", documents))
    with pytest.raises(ks.DefinitionError, match="has a session manager"):
        durable(agent)
