"""The observer that counts runs, steps, attempts and their durations for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..model import Event
from .metrics import BYTES, Histogram, Metric, text_of

#: Event of the end of a run: the status with which it is counted.
_ENDS = {
    "run.completed": "completed",
    "run.failed": "failed",
    "run.cancelled": "cancelled",
    "run.set_aside": "set aside",
}
#: Event of the end of an attempt: its outcome.
_OUTCOMES = {"step.completed": "success", "step.failed": "failure", "step.cancelled": "cancelled"}


class PrometheusObserver:
    """Count events and commits of this process in a bounded number of series.

    Labels are names that code gives to workflows, steps and services, never ids.

    `ks.open(observers="prometheus")` uses one that `keepstep.observers.prometheus.METRICS` holds; its `text` is the
    answer to a scrape.
    """

    def __init__(self, histogram: Callable[..., Histogram] = Histogram) -> None:
        #: Histograms are made with `histogram`: OpenTelemetry keeps its own.
        self.runs = Metric("keepstep_runs_total", "Runs that ended here.", ("workflow", "status"))
        self.ages = histogram("keepstep_run_seconds", "Ages of runs at their ends.", ("workflow", "status"))
        self.started = Metric(
            "keepstep_runs_started_total", "Runs that a worker of this process took up.", ("workflow",)
        )
        self.recovered = Metric("keepstep_recoveries_total", "Runs taken over from a dead worker.", ("workflow",))
        self.steps = Metric("keepstep_attempts_total", "Attempts of steps.", ("workflow", "step", "outcome"))
        self.failures = Metric(
            "keepstep_failures_total", "Attempts that failed, by the class of the error.", ("workflow", "step", "class")
        )
        self.retries = Metric("keepstep_retries_total", "Failed attempts that are tried again.", ("workflow", "step"))
        self.seconds = histogram("keepstep_attempt_seconds", "Durations of attempts.", ("workflow", "step"))
        self.trips = Metric("keepstep_breaker_trips_total", "Breakers that opened.", ("service",))
        self.leases = Metric(
            "keepstep_leases_lost_total", "Runs that another worker took over from this one.", ("workflow",)
        )
        self.halted = Metric("keepstep_halted_total", "Runs halted because the store could not save.", ("workflow",))
        self.commits = histogram("keepstep_commit_seconds", "Times that the store took for commits.")
        self.sizes = histogram("keepstep_checkpoint_bytes", "Sizes of checkpoints in the store.", bounds=BYTES)

    def observe(self, event: Event) -> None:
        name, workflow = event.name, event.workflow
        if (outcome := _OUTCOMES.get(name)) is not None:
            self._attempt(event, outcome)
        elif name == "run.started":
            self.started.add(workflow)
        elif name == "run.recovering":
            self.recovered.add(workflow)
        elif (status := _ENDS.get(name)) is not None and "outcome" not in event.data:
            self.runs.add(workflow, status)
            if "seconds" in event.data:
                self.ages.observe(workflow, status, value=event.data["seconds"])
        elif name == "breaker.opened":
            self.trips.add(str(event.data.get("service", "")))
        elif name == "lease.lost":
            self.leases.add(workflow)
        elif name == "run.halted":
            self.halted.add(workflow)

    def _attempt(self, event: Event, outcome: str) -> None:
        seconds = event.data.get("seconds")
        if seconds is None:  # a sleep, a wait or a refusal: no body ran
            return
        place = (event.workflow, step_of(event.step))
        error_class = event.data.get("error_class", "unknown") if outcome == "failure" else None
        self.count_attempt(place, outcome, seconds, error_class, is_retried="retry_at" in event.data)

    def count_attempt(
        self, place: tuple[str, str], outcome: str, seconds: float, error_class: str | None, *, is_retried: bool
    ) -> None:
        """Count an attempt whose body has ended; `place` is the workflow and the name of the step."""
        self.steps.add(*place, outcome)
        self.seconds.observe(*place, value=seconds)
        if error_class is not None:
            self.failures.add(*place, error_class)
        if is_retried:
            self.retries.add(*place)

    def observe_save(self, seconds: float, sizes: Sequence[int]) -> None:
        self.commits.observe(value=seconds)
        for size in sizes:
            self.sizes.observe(value=size)

    def text(self) -> str:
        """Return the counters in the text format of Prometheus."""
        return text_of(vars(self).values())


def step_of(key: str) -> str:
    """Return the name of a step without its branch and its number, which would make a series for each call."""
    return key.rpartition("/")[2].partition("#")[0]


#: The counters of this process, for `observers="prometheus"`.
METRICS = PrometheusObserver()
