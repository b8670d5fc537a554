"""Counters, gauges and histograms with a bounded number of series, written in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Series of one metric at most, so that no label can fill the memory. Further ones are counted together.
MOST_SERIES = 500
#: Value of every label of the series in which those beyond the limit are counted.
OTHER = "other"
#: Upper bounds of the buckets of a histogram in seconds: from one millisecond to an hour.
BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 3600.0)
#: Upper bounds of the buckets of a histogram in bytes: from a small record to the largest value of a step.
BYTES = (256.0, 1024.0, 4096.0, 16_384.0, 65_536.0, 262_144.0, 1_048_576.0, 10_485_760.0)


class Metric:
    """A counter or a gauge with labels."""

    def __init__(self, name: str, about: str, labels: Sequence[str] = (), *, kind: str = "counter") -> None:
        self.name, self.about, self.labels, self.kind = name, about, tuple(labels), kind
        self._values: dict[tuple[str, ...], float] = {} if labels or kind == "gauge" else {(): 0.0}
        self._lock = threading.Lock()

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """Add to the series with these labels."""
        with self._lock:
            key = bounded(self._values, labels)
            self._values[key] = self._values.get(key, 0.0) + amount

    def set(self, *labels: str, value: float) -> None:
        """Set the series with these labels."""
        with self._lock:
            self._values[bounded(self._values, labels)] = value

    def series(self) -> list[tuple[tuple[str, ...], float]]:
        """Return the values by their labels, in order."""
        with self._lock:
            return sorted(self._values.items())

    def lines(self) -> Iterator[str]:
        """Yield the metric in the text format."""
        found = self.series()
        yield from head(self)
        for key, value in found:
            yield f"{self.name}{_labelled(self.labels, key)} {_number(value)}"


class Histogram:
    """A histogram with labels."""

    kind = "histogram"

    def __init__(self, name: str, about: str, labels: Sequence[str] = (), bounds: Sequence[float] = BOUNDS) -> None:
        self.name, self.about, self.labels, self._bounds = name, about, tuple(labels), tuple(bounds)
        self._values: dict[tuple[str, ...], list[float]] = {} if labels else {(): self._zeros()}
        self._lock = threading.Lock()

    def observe(self, *labels: str, value: float) -> None:
        """Add a value to the series with these labels."""
        with self._lock:
            key = bounded(self._values, labels)
            counts = self._values.get(key)
            if counts is None:
                counts = self._values[key] = self._zeros()
            counts[bisect_left(self._bounds, value)] += 1
            counts[-1] += value

    def _zeros(self) -> list[float]:
        """Return the counts of the buckets, of the one beyond them, and the sum."""
        return [0.0] * (len(self._bounds) + 2)

    def lines(self) -> Iterator[str]:
        """Yield the metric in the text format: cumulative buckets, the sum and the count."""
        with self._lock:
            found = sorted((key, list(counts)) for key, counts in self._values.items())
        yield from head(self)
        for key, counts in found:
            total = 0.0
            for bound, count in zip((*map(_number, self._bounds), "+Inf"), counts, strict=False):
                total += count
                yield f"{self.name}_bucket{_labelled((*self.labels, 'le'), (*key, bound))} {_number(total)}"
            yield f"{self.name}_sum{_labelled(self.labels, key)} {_number(counts[-1])}"
            yield f"{self.name}_count{_labelled(self.labels, key)} {_number(total)}"


def text_of(metrics: Iterable[Metric | Histogram]) -> str:
    """Return metrics in the text format."""
    return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"


def head(metric: Metric | Histogram) -> Iterator[str]:
    """Yield the lines before the series of a metric."""
    yield f"# HELP {metric.name} {metric.about}"
    yield f"# TYPE {metric.name} {metric.kind}"


def bounded(values: Mapping[tuple[str, ...], object], labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a series; those of the common one if there are too many."""
    return labels if labels in values or len(values) < MOST_SERIES else (OTHER,) * len(labels)


def _labelled(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
