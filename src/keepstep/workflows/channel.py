"""Channels: where notices about runs that need a person go, and the workflow that delivers them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ..checks import check_name, check_number
from ..errors import DefinitionError
from ..model.keepers import delivery_workflow
from ..model.notices import DEFAULT_TOPICS, TOPICS, Topic
from ..policies import Retry
from ..values import Secret
from .definition import KNOWN, Step, Workflow

#: Attempts of a delivery and their waits: about 40 minutes in all, so that a restart of the receiver loses no notice.
DELIVERY_RETRY = Retry(attempts=12, base_seconds=2.0, cap_seconds=600.0, jitter=0.2)
#: Seconds that one attempt of a `notify=` function may take.
NOTIFY_SECONDS = 60.0
#: Seconds for which a channel gathers notices before it delivers them together.
GATHER_SECONDS = 10.0
_SCHEMES = ("http", "https")


class Channel:
    """A channel that tells people about runs: by a web hook, or by a function of the program.

    | option | means |
    |---|---|
    | `webhook` | the URL that notices are posted to as JSON; a `ks.Secret` if the URL itself is secret |
    | `secret` | a `ks.Secret` with which each request is signed |
    | `notify` | instead of `webhook`: a function of one dict, called in a step |
    | `on` | topics: `"failed"`, `"set_aside"`, `"in_doubt"`, `"breaker"`, `"waiting"`; all but the last by default |
    | `gather` | seconds for which notices are gathered, to be delivered together; 10 by default |
    | `timeout` | seconds that one request may take; 10 by default |

    Processes that declare a channel tell it about the runs that they drive.
    """

    __slots__ = ("delivery", "gather_seconds", "name", "notify", "on", "secret", "timeout_seconds", "webhook")

    def __init__(
        self,
        name: str,
        *,
        webhook: str | Secret | None = None,
        secret: Secret | None = None,
        notify: Callable[[dict[str, Any]], Any] | None = None,
        on: Iterable[Topic] = DEFAULT_TOPICS,
        gather: float = GATHER_SECONDS,
        timeout: float = 10.0,
    ) -> None:
        self.name = check_name(name, "channel")
        where = f"ks.Channel({name!r})"
        self.on = frozenset([on] if isinstance(on, str) else on)
        if unknown := self.on.difference(TOPICS):
            raise DefinitionError(
                f"{where}: on= has no topic {min(map(str, unknown))!r}; choose from {', '.join(TOPICS)}"
            )
        self.gather_seconds = float(check_number(gather, "gather", 0.1, 86_400))
        self.timeout_seconds = float(check_number(timeout, "timeout", 0.1, 3600))
        if (webhook is None) == (notify is None):
            raise DefinitionError(f"{where}: give either webhook= or notify=")
        if webhook is not None:
            _check_webhook(where, webhook, secret)
        elif secret is not None:
            raise DefinitionError(f"{where}: secret= signs the requests of webhook=, and notify= makes none")
        elif not callable(notify):
            raise DefinitionError(f"{where}: notify= must be a function of one dict, got {type(notify).__name__}")
        self.webhook, self.secret, self.notify = webhook, secret, notify
        self.delivery = _delivery(self)
        CHANNELS[name] = self
        KNOWN[self.delivery.name] = self.delivery

    def __repr__(self) -> str:
        return f"ks.Channel({self.name!r}, on={sorted(self.on)})"


#: The channels that this process has declared, the newest of each name.
CHANNELS: dict[str, Channel] = {}


def _check_webhook(where: str, webhook: Any, secret: Any) -> None:
    from urllib.parse import urlsplit  # noqa: PLC0415 - slow to import, and only needed with a channel

    parts = urlsplit(webhook) if isinstance(webhook, str) else None
    if not isinstance(webhook, Secret) and (parts is None or parts.scheme not in _SCHEMES or not parts.netloc):
        raise DefinitionError(f"{where}: webhook= must be a URL that begins with https:// or http://, or a ks.Secret")
    if secret is not None and not isinstance(secret, Secret):
        raise DefinitionError(f"{where}: secret= must be a ks.Secret, so that it is neither stored nor logged")


class Delivery(Workflow[..., None]):
    """The workflow of the runs that deliver notices."""

    is_built_in = True


def _delivery(channel: Channel) -> Delivery:
    """Return the workflow that delivers the notices of a channel in one step."""
    notify = channel.notify

    def post(digest: dict[str, Any]) -> None:
        from .webhook import send  # noqa: PLC0415 - only to deliver

        send(channel.webhook, channel.secret, digest, channel.timeout_seconds)

    async def call(digest: dict[str, Any]) -> None:
        await notify(digest)  # type: ignore[misc] # only used for an async function

    def call_plainly(digest: dict[str, Any]) -> None:
        notify(digest)  # type: ignore[misc] # only used for a plain function

    body: Callable[..., Any] = post
    if notify is not None:
        body = call if inspect.iscoroutinefunction(notify) else call_plainly
    name = "webhook" if notify is None else "notify"
    step: Step[..., None] = Step(body, name=name, retry=DELIVERY_RETRY, timeout=NOTIFY_SECONDS)

    async def deliver(digest: dict[str, Any]) -> None:
        await step(digest)

    return Delivery(deliver, name=delivery_workflow(channel.name))
