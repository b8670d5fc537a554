"""The command `services`: lists the services, shows one, changes its limits, and opens or closes its breaker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .limits import LIMIT, RATE, log_table, unknown_gate
from .settings import REASON, Settings, command

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.services import ServiceInfo

_ACTS = ("list", "show", "set", "reset", "open", "close")


class _BreakerLimit(click.ParamType[Any]):
    """A breaker such as `5/300/60` (failures, within, open), `default` or `none`."""

    name = "breaker"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ..errors import DefinitionError
        from ..policies.breaker import Breaker

        if value == "none" or not isinstance(value, str):
            return value
        try:
            return Breaker.written(value)
        except DefinitionError as error:
            self.fail(str(error), param, ctx)


@command("services")
@click.argument("act", default="list", type=click.Choice(_ACTS), metavar="[ACT]")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--concurrency", type=LIMIT, metavar="N", help="Attempts whose bodies run at once, or none.")
@click.option("--rate", type=RATE, metavar="N/SECONDS[/BURST]", help="How often attempts begin, or none.")
@click.option("--spend", type=RATE, metavar="N/SECONDS[/BURST]", help="How much attempts may spend, or none.")
@click.option("--breaker", type=_BreakerLimit(), metavar="FAILURES/WITHIN/OPEN", help="The breaker, default or none.")
@click.option("--when-open", type=click.Choice(["wait", "fail"]), help="What attempts do while the breaker is open.")
@REASON
def services(settings: Settings, *, act: str, name: str | None, reason: str, **options: Any) -> None:
    """List the services, show, set or reset one, or open or close its breaker.

    ACT is list, show, set, reset, open or close. A limit that is set holds until it is reset, even if the code declares
    another one. It holds within a second; a lower limit holds as places fall free. A breaker that is opened or closed
    stays so until it is reset.
    """
    from ..views import plain

    given = {option: None if value == "none" else value for option, value in options.items() if value is not None}
    if given and act != "set":
        raise click.UsageError(f"limits are given with set: keepstep services set {name or 'NAME'} …")
    if act != "list" and name is None:
        raise click.UsageError(f"name the service: keepstep services {act} NAME")
    if act == "list":
        _list(settings, name)
        return
    if act == "set" and not given:
        raise click.UsageError("name a limit to set, for example --concurrency 10")

    async def change(engine: Engine) -> tuple[ServiceInfo, list[ServiceInfo]]:
        one, services = name or "", engine.services
        if act == "set":
            info = await services.set(one, reason=reason, **given)
        elif act == "show":
            info = await services.get(one)
        else:
            acts = {"reset": services.reset, "open": services.open_breaker, "close": services.close_breaker}
            info = await acts[act](one, reason=reason)
        return info, await services.list()

    info, known = settings.talk(change)
    settings.answer(plain.service_data(info), lambda: _shown(info))
    if info.declared is None and not info.shares and not info.parked and not settings.json:
        click.echo(unknown_gate("service", info.name, (one.name for one in known)), err=True)


def _list(settings: Settings, name: str | None) -> None:
    from ..views import plain, wording
    from . import formatting

    async def look(engine: Engine) -> list[ServiceInfo]:
        return [one for one in await engine.services.list() if name in (None, one.name)]

    found = settings.look(look)

    def shown() -> str:
        if not found:
            return "there is no service; declare one with ks.Service(...), or keepstep services set NAME"
        rows = [
            (one.name, str(_held(one)), str(one.parked), _breaker(one), str(one.limits), wording.changed_by(one))
            for one in found
        ]
        return formatting.table(("SERVICE", "PLACES HELD", "PARKED", "BREAKER", "LIMITS", "FROM"), rows)

    settings.answer({"services": [plain.service_data(one) for one in found]}, shown)


def _held(info: ServiceInfo) -> int:
    return sum(share.held for share in info.shares)


def _breaker(info: ServiceInfo) -> str:
    if info.breaker is None:
        return "none"
    return f"{info.breaker.status}{' (by hand)' if info.breaker.by_hand else ''}"


def _shown(info: ServiceInfo) -> str:
    from ..views import plain, wording
    from . import formatting

    lines = [f"service  {info.name}", f"limits   {info.limits}"]
    if info.is_set:
        lines.append(f"set by   {wording.changed_by(info)}; the code declares: {info.declared or 'nothing'}")
    if info.breaker is not None:
        since = "" if info.breaker.opened_at is None else f", opened {formatting.local(info.breaker.opened_at)}"
        lines.append(
            f"breaker  {_breaker(info)}{since}; {info.breaker.failures} failures count, {info.breaker.probes} probes"
        )
        if (probes_at := plain.probes_at(info)) is not None:
            lines.append(f"probes   from {formatting.local(probes_at)} on ({formatting.ago(probes_at)})")
    since = "" if info.parked_since is None else f", the first since {formatting.local(info.parked_since)}"
    lines.append(f"parked   {info.parked} runs wait for a place{since}")
    if info.shares:
        rows = [(share.worker, str(share.held), str(max(share.need, 0))) for share in info.shares]
        lines += ["", formatting.table(("WORKER", "HOLDS", "NEEDS"), rows)]
    return "\n".join([*lines, *log_table(info.log, _change)])


def _change(limits: dict[str, Any] | None) -> str:
    from ..policies.service import ServiceLimits

    return "" if limits is None else str(ServiceLimits.of(limits))
