"""The counters of Prometheus as instruments of OpenTelemetry: the same table, read by the exporter of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation

from ..metrics import BOUNDS, Histogram, Metric, bounded
from ..prometheus import PrometheusObserver, step_of

#: Endings of names that tell a unit: the unit of OpenTelemetry, and the word that a distribution is named with.
_UNITS = {"_seconds": ("s", "_duration"), "_bytes": ("By", "_size")}

#: Counters and gauges of a process.
Read = Callable[[], Sequence[Metric]]


class Instruments(PrometheusObserver):
    """Counts as for Prometheus; counters are read when the program's reader collects, distributions are recorded."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._meter = self._provider.get_meter("keepstep")
        super().__init__(histogram=partial(_Distribution, self._meter))
        self._reads: list[Read] = []
        self._read: set[str] = set()
        for metric in list(vars(self).values()):
            if isinstance(metric, Metric):
                self._observe(metric, partial(_observations, metric))

    def read_from(self, read: Read) -> None:
        """Tell the counters and gauges of an engine, too, as long as it is open."""
        self._reads.append(read)
        for metric in read():
            if metric.name not in self._read:
                self._read.add(metric.name)
                self._observe(metric, partial(self._of_engines, metric.name))

    def recorded(self, workflow: str, record: Any) -> None:
        """Count the attempt whose outcome a record is."""
        if record.started_at is not None:
            seconds = (record.finished_at - record.started_at).total_seconds()
            error_class = None if record.outcome != "failure" or record.error is None else record.error.error_class
            place, is_retried = (workflow, step_of(record.step)), record.retry_at is not None
            self.count_attempt(place, record.outcome, seconds, error_class, is_retried=is_retried)

    def _of_engines(self, name: str, options: CallbackOptions) -> Iterable[Observation]:
        for read in list(self._reads):
            try:
                found = [one for metric in read() if metric.name == name for one in _observations(metric, options)]
            except Exception:  # noqa: BLE001 - the engine is closed
                self._reads.remove(read)
                continue
            yield from found

    def _observe(self, metric: Metric, callback: Callable[[CallbackOptions], Iterable[Observation]]) -> None:
        make = self._meter.create_observable_gauge
        if metric.kind == "counter":
            make = self._meter.create_observable_counter
        name, unit = named(metric.name)
        make(name, [callback], unit=unit, description=metric.about)

    def flush(self) -> None:
        """Let the reader collect now."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None:
            flush()


class _Distribution(Histogram):
    """A histogram that OpenTelemetry keeps."""

    def __init__(
        self, meter: Any, name: str, about: str, labels: Sequence[str] = (), bounds: Sequence[float] = BOUNDS
    ) -> None:
        super().__init__(name, about, labels, bounds)
        full, unit = named(name, distribution=True)
        self._instrument = meter.create_histogram(
            full, unit=unit, description=about, explicit_bucket_boundaries_advisory=list(bounds)
        )
        self._attributes: dict[tuple[str, ...], dict[str, str]] = {}

    def observe(self, *labels: str, value: float) -> None:
        key = bounded(self._attributes, labels)
        attributes = self._attributes.get(key)
        if attributes is None:
            attributes = self._attributes[key] = dict(zip(self.labels, key, strict=True))
        self._instrument.record(value, attributes)


def named(name: str, *, distribution: bool = False) -> tuple[str, str]:
    """Return the name and the unit of an instrument, from the name in Prometheus."""
    plain, unit = name.removesuffix("_total"), ""
    for ending, (found, word) in _UNITS.items():
        if plain.endswith(ending):
            plain, unit = plain.removesuffix(ending) + (word if distribution else ""), found
    return plain.replace("_", "."), unit


def _observations(metric: Metric, _: CallbackOptions) -> list[Observation]:
    return [Observation(value, dict(zip(metric.labels, key, strict=True))) for key, value in metric.series()]
