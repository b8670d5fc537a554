"""The dashboard and the alerts in the documentation ask only for metrics and labels that exist."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import keepstep as ks
from keepstep.engine.process_metrics import process_metrics
from keepstep.model import Event
from keepstep.observers.metrics import text_of
from keepstep.observers.prometheus import PrometheusObserver
from keepstep.policies import queue as queues
from keepstep.policies import service as services
from keepstep.views.metrics import store_metrics
from keepstep.workflows.definition import KNOWN, SERVICES

REFERENCE = Path(__file__).parents[2] / "docs/reference"
BOARD = json.loads((REFERENCE / "grafana.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((REFERENCE / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
#: What a metric is followed by in an expression: its matchers and its range, both optional.
USE = re.compile(r"(?P<name>\bkeepstep_\w+)(?P<matchers>\{[^}]*\})?(?P<range>\[[^]]+\])?")
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in RULES]


@pytest.fixture(scope="module")
def scraped():
    """The labels and the type of each series of a worker and of `serve` after a small load, by name."""
    declared = [(one, dict(one)) for one in (queues.DECLARED, services.DECLARED, KNOWN)]
    names = set(SERVICES)
    try:
        return loaded()
    finally:  # what it declares must not be served by the engines of other tests
        for one, before in declared:
            one.clear()
            one.update(before)
        SERVICES.intersection_update(names)


def loaded():
    observer = PrometheusObserver()
    mail = ks.Service("mail", breaker=ks.Breaker(failures=1, within=60, open_seconds=60))

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0))
    async def flaky():
        if ks.attempt() == 1:
            raise ConnectionResetError("down")

    @ks.step(service=mail)
    async def post():
        raise ConnectionResetError("down")

    @ks.workflow(name="shown", queue=ks.Queue("shown", concurrency=2))
    async def program():
        await flaky()
        await post()

    async def main():
        async with ks.open("memory:", observers=observer) as engine:
            with pytest.raises(ks.RunFailed):
                await (await engine.start(program)).result(30)
            at = engine.clock.now()
            for name in ("run.recovering", "lease.lost", "run.halted"):
                observer.observe(Event(name, "r", at, "shown"))
            await engine.call(engine.worker.beat_once)
            return text_of(process_metrics(engine)), await engine.call(store_metrics, engine.store)

    texts = [*asyncio.run(main()), observer.text()]
    series = {}
    for family in [family for text in texts for family in text_string_to_metric_families(text)]:
        for sample in family.samples:
            kind = "counter" if sample.name.endswith(("_total", "_bucket", "_sum", "_count")) else family.type
            series.setdefault(sample.name, (kind, set()))[1].update(sample.labels)
    return series


def uses():
    return sorted({match.group() for expression in EXPRESSIONS for match in USE.finditer(expression)})


@pytest.mark.parametrize("use", uses())
def test_each_metric_exists_with_its_labels(scraped, use):
    match = USE.match(use)
    kind, labels = scraped[match["name"]]
    assert set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", match["matchers"] or "")) <= labels
    assert bool(match["range"]) is (kind == "counter"), "a counter needs a rate, and a gauge has none"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_each_grouping_is_by_labels_of_the_metric(scraped, expression):
    by = {label.strip() for found in re.findall(r"\bby \(([^)]*)\)", expression) for label in found.split(",")}
    for match in USE.finditer(expression):
        assert by <= scraped[match["name"]][1]
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_legend_names_labels_that_remain(panel):
    for target in panel["targets"]:
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        by = {one.strip() for found in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for one in found.split(",")}
        assert shown <= by
        assert by - {"le"} <= shown


def test_dashboard_shows_every_metric(scraped):
    """A metric that no panel shows is one that nobody looks at."""
    shown = {USE.match(use)["name"].removesuffix("_bucket") for use in uses()}
    names = {re.sub("_(bucket|sum|count|created)$", "", name) for name in scraped}
    by_hand = {
        "keepstep_driven_runs",
        "keepstep_process_cpu_seconds_total",
        "keepstep_process_loop_lag_seconds",
        "keepstep_process_resident_bytes",
        "keepstep_process_threads",
        "keepstep_rate",
        "keepstep_worker_commits_total",
        "keepstep_worker_failures_total",
        "keepstep_worker_halted_total",
        "keepstep_worker_info",
        "keepstep_worker_open_runs",
        "keepstep_worker_runs_total",
        "keepstep_worker_save_failures_total",
    }
    assert names - shown == by_hand


def test_panels_do_not_overlap():
    cells = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


def test_alerts_have_a_name_a_summary_and_an_action():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        by = set(re.findall(r"by \((\w+)\)", rule["expr"]))
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= by


def test_page_names_every_metric(scraped):
    page = (REFERENCE.parent / "how-to/observe.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(keepstep_\w+)`", page))
    named |= {f"keepstep_worker{end}" for end in re.findall(r"`…(_\w+)`", page)}
    assert named == {re.sub("_(bucket|sum|count|created)$", "", name) for name in scraped}
