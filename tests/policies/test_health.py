"""The health of an agent, and who gets a task: pure functions, whatever they are given (F2, F6)."""

from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.agent import AgentRecord, HostedAgent, agents_in, agents_text
from keepstep.policies.assignment import Candidate, rank, score_of
from keepstep.policies.health import GONE, LEAST, Health, health_of

RECORDS = st.builds(
    AgentRecord,
    results=st.integers(0, 100),
    success_rate=st.none() | st.floats(0, 1),
    mean_seconds=st.none() | st.floats(0, 1e4),
    failures_in_a_row=st.integers(0, 100),
)
NAMES = st.text("abcdef", min_size=1, max_size=3)
CANDIDATES = st.builds(
    Candidate,
    name=NAMES,
    capabilities=st.frozensets(NAMES, max_size=4),
    tasks=st.integers(0, 50),
    places=st.none() | st.integers(1, 20),
    success_rate=st.none() | st.floats(0, 1),
    health=st.builds(health_of, RECORDS, st.floats(0, 200)),
    withheld=st.sampled_from(["", "is draining"]),
)


def test_formula_by_hand():
    assert health_of(AgentRecord()) == Health(100.0, "healthy")
    assert health_of(AgentRecord(mean_seconds=10.0)).score == 100
    assert health_of(AgentRecord(mean_seconds=15.0)).parts == {"slow": 15.0}
    assert health_of(AgentRecord(mean_seconds=90.0)).parts == {"slow": 30.0}
    assert health_of(AgentRecord(mean_seconds=20.0), slow_seconds=60).score == 100
    assert health_of(AgentRecord(success_rate=0.8)).score == 100
    assert health_of(AgentRecord(success_rate=0.5)).parts == {"failures": 30.0}
    assert health_of(AgentRecord(failures_in_a_row=2)).score == 100
    assert health_of(AgentRecord(failures_in_a_row=3)).parts == {"failures in a row": 20.0}
    assert health_of(AgentRecord(), 59.9).score == 100
    assert health_of(AgentRecord(), 60.0).parts == {"unseen": 40.0}
    worst = AgentRecord(success_rate=0.0, failures_in_a_row=9, mean_seconds=100.0)
    assert health_of(worst, 70.0) == Health(
        0.0, "offline", {"slow": 30.0, "failures": 80.0, "failures in a row": 20.0, "unseen": 40.0}
    )


def test_statuses_by_score_and_silence():
    rates = {0.6: "healthy", 0.59: "degraded", 0.4: "degraded", 0.39: "unhealthy", 0.0: "unhealthy"}
    for rate, status in rates.items():
        assert health_of(AgentRecord(success_rate=rate)).status == status, rate
    assert health_of(AgentRecord(success_rate=0.0, failures_in_a_row=3)).status == "offline"
    assert health_of(AgentRecord(), 90.0).status == "degraded"
    assert health_of(AgentRecord(), 90.1).status == "offline"
    assert str(health_of(AgentRecord(success_rate=0.3))) == "unhealthy (50: failures -50)"
    assert not GONE.works


@given(RECORDS, st.floats(0, 300))
def test_score_is_what_the_parts_leave(record, unseen):
    health = health_of(record, unseen)
    assert abs(health.score - max(0.0, 100.0 - sum(health.parts.values()))) < 0.1
    if unseen <= 90:
        least = {status: score for score, status in LEAST}
        assert health.score >= least.get(health.status, 0.0)
    else:
        assert health.status == "offline"


@given(RECORDS, st.floats(0, 80), st.floats(0, 1), st.integers(0, 5))
def test_no_one_gets_healthier_by_failing_or_by_silence(record, unseen, worse, more):
    before = health_of(record, unseen)
    rate = None if record.success_rate is None else record.success_rate * worse
    failing = AgentRecord(record.results, rate, record.mean_seconds, record.failures_in_a_row + more)
    assert health_of(failing, unseen).score <= before.score
    assert health_of(record, unseen + 100).score <= before.score


@given(
    st.lists(NAMES, min_size=1, max_size=3), st.lists(CANDIDATES, max_size=6, unique_by=lambda one: one.name), st.data()
)
def test_assignment_keeps_its_rules(needs, candidates, data):
    tried = data.draw(st.sets(st.sampled_from([one.name for one in candidates]))) if candidates else set()
    least = data.draw(st.floats(0, 1))
    scores = rank(needs, candidates, tried, least)
    by_name = {one.name: one for one in candidates}
    chosen = [one for one in scores if not one.why_not]
    assert scores[: len(chosen)] == chosen, "those in question come first"
    assert [one.score for one in chosen] == sorted((one.score for one in chosen), reverse=True)
    for one in chosen:
        candidate = by_name[one.agent]
        assert candidate.health.works
        assert not candidate.withheld
        assert one.agent not in tried
        assert one.match >= round(least, 4) - 1e-4
        assert one.match > 0
        assert 0 <= one.score <= 1
    for name, candidate in by_name.items():
        could = candidate.health.works and not candidate.withheld and name not in tried
        full = name in needs or all(need in candidate.capabilities for need in needs)
        assert not (could and full) or any(one.agent == name for one in chosen), "whoever can perform it is in question"
    assert rank(needs, reversed(candidates), tried, least) == scores, "the order of the registry does not matter"


def test_match_weighs_more_than_load_and_record():
    busy = Candidate("busy", {"a", "b"}, tasks=9, places=10, success_rate=0.6)
    idle = Candidate("idle", {"a"}, tasks=0, places=10, success_rate=1.0)
    assert [one.agent for one in rank(["a", "b"], [idle, busy], least=0.5)] == ["busy", "idle"]
    assert rank(["a", "b"], [idle, busy])[1].why_not == "lacks a capability"
    score = score_of(["a"], Candidate("x", {"a"}, tasks=1, places=4, success_rate=0.5))
    assert score.score == round(0.6 + 0.2 * 0.8 + 0.2 * 0.5, 4)


def test_fuller_agent_has_the_lower_score_however_full():
    full, fuller = (Candidate(name, {"a"}, tasks=tasks, places=2) for name, tasks in (("full", 40), ("a-fuller", 50)))
    assert [one.agent for one in rank(["a"], [fuller, full])] == ["full", "a-fuller"]


@given(st.lists(st.builds(HostedAgent, name=NAMES, capabilities=st.tuples(NAMES), record=RECORDS), max_size=3))
def test_heartbeat_brings_agents_back(agents):
    assert list(agents_in(agents_text(agents))) == agents


def test_heartbeat_of_another_version_is_read_as_far_as_possible():
    assert agents_in(b'[{"name":"a","new":1,"record":{"results":2,"newer":3}},7,{"no":"name"}]') == (
        HostedAgent("a", record=AgentRecord(results=2)),
    )
    assert agents_in(b"{") == agents_in(b"3") == agents_in(None) == ()
