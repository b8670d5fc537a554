"""OpenTelemetry: traces, metrics and the context of code, made from the events of records with derived ids."""

from __future__ import annotations

from .observer import OpenTelemetryObserver, export

__all__ = ["OpenTelemetryObserver", "export"]
