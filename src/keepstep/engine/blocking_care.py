"""Maintenance of a store, and its schedules, for blocking code."""

from __future__ import annotations

from ..care.facade import Care
from .blocking_calls import BlockingPart, blocking
from .schedules import Schedules


class BlockingCare(BlockingPart[Care]):
    """Maintains the store of a blocking engine: the methods of `engine.care`, without `await`."""

    accept_loss = blocking(Care.accept_loss)
    assess = blocking(Care.assess)
    copy_to = blocking(Care.copy_to)
    divide_history = blocking(Care.divide_history)
    erase = blocking(Care.erase)
    export = blocking(Care.export)
    load = blocking(Care.load)
    purge = blocking(Care.purge)
    repair = blocking(Care.repair)
    retain = blocking(Care.retain)
    rewrite = blocking(Care.rewrite)
    verify = blocking(Care.verify)


class BlockingSchedules(BlockingPart[Schedules]):
    """The schedules of a blocking engine: the methods of `engine.schedules`, without `await`."""

    add = blocking(Schedules.add)
    backfill = blocking(Schedules.backfill)
    get = blocking(Schedules.get)
    list = blocking(Schedules.list)
    pause = blocking(Schedules.pause)
    remove = blocking(Schedules.remove)
    resume = blocking(Schedules.resume)
    trigger = blocking(Schedules.trigger)
