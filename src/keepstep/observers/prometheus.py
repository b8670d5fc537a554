"""The observer that counts runs, steps, attempts and their durations for Prometheus."""

from __future__ import annotations

from ..model import Event
from .metrics import Histogram, Metric, text_of

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
    """Count events of this process in a bounded number of series. Labels are names of workflows, steps and services.

    `ks.open(observers="prometheus")` uses one that `keepstep.observers.prometheus.METRICS` holds; its `text` is the
    answer to a scrape.
    """

    def __init__(self) -> None:
        self.runs = Metric("keepstep_runs_total", "Runs that ended here.", ("workflow", "status"))
        self.started = Metric(
            "keepstep_runs_started_total", "Runs that a worker of this process took up.", ("workflow",)
        )
        self.recovered = Metric("keepstep_recoveries_total", "Runs taken over from a dead worker.", ("workflow",))
        self.steps = Metric("keepstep_attempts_total", "Attempts of steps.", ("workflow", "step", "outcome"))
        self.retries = Metric("keepstep_retries_total", "Failed attempts that are tried again.", ("workflow", "step"))
        self.seconds = Histogram("keepstep_attempt_seconds", "Durations of attempts.", ("workflow", "step"))
        self.trips = Metric("keepstep_breaker_trips_total", "Breakers that opened.", ("service",))
        self.leases = Metric(
            "keepstep_leases_lost_total", "Runs that another worker took over from this one.", ("workflow",)
        )
        self.halted = Metric("keepstep_halted_total", "Runs halted because the store could not save.", ("workflow",))

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
        step = step_of(event.step)
        self.steps.add(event.workflow, step, outcome)
        self.seconds.observe(event.workflow, step, seconds=seconds)
        if "retry_at" in event.data:
            self.retries.add(event.workflow, step)

    def text(self) -> str:
        """Return the counters in the text format of Prometheus."""
        return text_of(vars(self).values())


def step_of(key: str) -> str:
    """Return the name of a step without its branch and its number, which would make a series for each call."""
    return key.rpartition("/")[2].partition("#")[0]


#: The counters of this process, for `observers="prometheus"`.
METRICS = PrometheusObserver()
