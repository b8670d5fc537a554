"""The acts that a person can do on a run, as the dialogs of its page: the most likely first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ...model import Run, Status
from ...model.run import handed_over
from ...views.waits import Act, Action
from ...views.wording import one_line, step_name

if TYPE_CHECKING:
    from ...views.overview import Overview

#: Characters of a name in a button.
_NAME = 40
_JSON = {"name": "payload", "label": "Payload as JSON", "type": "json", "required": True}
_RESULT = {"name": "value", "label": "Result as JSON", "type": "json", "required": True}


def acts_of(view: Overview) -> list[dict[str, Any]]:
    """Return the dialogs of the acts that fit a run; the first is the most likely one."""
    run = view.newest or view.run
    answered = [action for action in view.actions if action.act is Act.APPROVE]
    found = [one for action in view.actions for one in _fitting(run, action, named=len(answered) > 1)]
    if found:
        found[0]["main"] = True
    return [*found, *_general(run, view)]


def acts_at(run: Run, seq: int) -> list[tuple[str, str]]:
    """Return the links of the acts that begin at a record: the path of the page, and its text."""
    path = f"/runs/{quote(run.id, safe='')}/travel?at={seq}"
    return [(path, "Travel, fork or rewind…")]


def _url(run: Run, verb: str) -> str:
    return f"/api/v1/runs/{quote(run.id, safe='')}/{verb}"


def _seen(run: Run) -> dict[str, int]:
    """Return the record and the signal that were seen last, so that the second of two people who decide is refused.

    A run that a worker drives moves on while a person reads, so that every act would be refused.
    """
    return {} if run.status.active else {"seq": run.seq, "signals": run.signals}


def _act(run: Run, route: str, label: str, text: str, **more: Any) -> dict[str, Any]:
    """Return a dialog whose command takes a reason."""
    return {
        "label": label,
        "title": f"{label}: {run.id}",
        "text": text,
        "url": _url(run, route),
        "body": _seen(run),
        "given": {"run": run.id},
        "command": f"keepstep {route} {{run}}[ --reason {{reason}}]",
        "done": f"{label}: the run was asked",
        **more,
    }


def _fitting(run: Run, action: Action, *, named: bool) -> list[dict[str, Any]]:
    name, shown = action.name, one_line(step_name(action.name), _NAME)
    match action.act:
        case Act.APPROVE:
            yes_or_no = [_answer(run, verb, name, named=named) for verb in ("approve", "deny")]
            return [*yes_or_no, _signal(run, name, named=named)]
        case Act.SIGNAL:
            return [_signal(run, name, named=True)]
        case Act.RESOLVE:
            return _verdicts(run, name, shown)
        case Act.RESUME:
            return [_act(run, "resume", "Resume", "Let the run go on.")]
        case Act.RETRY:
            text = "Let the run go on from just before it failed. Steps that are done do not run again."
            return [_act(run, "retry", "Retry", text)]
        case Act.SKIP:
            text = "Accept the undo steps that have failed as they are, so that the run ends."
            return [_act(run, "skip", "Accept failed undo steps", text, role="admin", danger=True)]
        case Act.EDIT:
            return [_edit(run)]
        case Act.WORKER:
            return []  # a worker is a process, which no page starts


def _answer(run: Run, verb: str, name: str, *, named: bool) -> dict[str, Any]:
    shown = one_line(name, _NAME)
    says = "true" if verb == "approve" else "false"
    return {
        "label": f"{verb.capitalize()} {shown}" if named else verb.capitalize(),
        "title": f"{verb.capitalize()} {shown}",
        "text": f"Send {says} as the signal {name}.",
        "url": _url(run, verb),
        "body": {"name": name, **_seen(run)},
        "reason": False,
        "given": {"run": run.id, "signal": name},
        "command": f"keepstep approve {{run}} {{signal}}{' --deny' if verb == 'deny' else ''}",
        "done": f"{shown}: {'approved' if verb == 'approve' else 'denied'}",
    }


def _signal(run: Run, name: str, *, named: bool) -> dict[str, Any]:
    shown = one_line(name, _NAME)
    return {
        "label": f"Answer {shown} with a value…" if named else "Answer with a value…",
        "title": f"Send signal {shown}",
        "text": "Send a value to the run.",
        "verb": "Send",
        "url": _url(run, "signal"),
        "body": {"name": name, **_seen(run)},
        "fields": [_JSON],
        "reason": False,
        "given": {"run": run.id, "signal": name},
        "command": "keepstep signal {run} {signal} {payload}",
        "done": f"Signal {shown} was sent",
    }


def _verdicts(run: Run, step: str, shown: str) -> list[dict[str, Any]]:
    """Return the three verdicts on a step in doubt, which may or may not have happened."""
    ask = f"Step {shown} may or may not have happened. Look it up at its service first. "
    happened = "It counts as completed with this result, and its body does not run again."
    failed = "It counts as failed, and the run receives StepInDoubt. Its body does not run again."
    again = "Its body runs again. If it has happened, its effect happens twice."
    return [
        _verdict(run, step, "result", f"{shown} happened…", ask + happened, fields=[_RESULT]),
        _verdict(run, step, "failed", f"{shown} failed", ask + failed),
        _verdict(run, step, "again", f"Run {shown} again", ask + again, danger=True),
    ]


def _verdict(run: Run, step: str, verdict: str, label: str, text: str, **more: Any) -> dict[str, Any]:
    value = " {value}" if verdict == "result" else ""
    return _act(
        run,
        "resolve",
        label,
        text,
        body={"step": step, "verdict": verdict, **_seen(run)},
        given={"run": run.id, "step": step_name(step)},
        command=f"keepstep resolve {{run}} {{step}} --{verdict}{value}[ --reason {{reason}}]",
        **more,
    )


def _edit(run: Run) -> dict[str, Any]:
    fields = [
        {"name": "values", "label": "New values, as a JSON object", "type": "json", "value": {}, "required": True},
        {"name": "stage", "label": "Stage", "help": "Leave it empty for the state of the graph itself."},
        {"name": "next", "label": "Next step", "help": "Leave it empty to go on where the graph stands."},
    ]
    text = "Change keys of the graph's state. The run goes on from there."
    return _act(
        run,
        "edit",
        "Edit state…",
        text,
        title="Edit the state",
        verb="Edit",
        role="admin",
        danger=True,
        fields=fields,
        command="keepstep edit {run} --set KEY=JSON[ --stage {stage}][ --next {next}][ --reason {reason}]",
    )


def _general(run: Run, view: Overview) -> list[dict[str, Any]]:
    """Return acts that fit the status of a run, whatever it waits for."""
    if handed_over(run):
        return []
    found = []
    if not run.status.finished and run.status not in (Status.PAUSED, Status.SET_ASIDE) and view.request is None:
        found.append(_act(run, "pause", "Pause", "Stop the run at its next step, until somebody resumes it."))
    if not run.status.finished:
        found.append(_any_signal(run))
    if run.status in (Status.SET_ASIDE, Status.FAILED) or _lost_worker(view):
        found.append(_recover(run))
    if run.seq:
        link = {"label": "Fork or rewind…", "href": acts_at(run, run.seq)[0][0], "role": "read"}
        found.append(link)
    if not run.status.finished and (view.request is None or view.request.act != "cancel"):
        text = "Cancel the run, with its steps, waits and children. This is final."
        found.append(_act(run, "cancel", "Cancel run…", text, verb="Cancel the run", role="admin", danger=True))
    return found


def _lost_worker(view: Overview) -> bool:
    return view.run.status.active and (view.worker is None or not view.worker.alive)


def _any_signal(run: Run) -> dict[str, Any]:
    return {
        "label": "Signal…",
        "title": f"Send a signal to {run.id}",
        "text": "The run keeps the signal until its code waits for it.",
        "verb": "Send",
        "url": _url(run, "signal"),
        "body": {},
        "fields": [{"name": "name", "label": "Name", "required": True}, {**_JSON, "value": True}],
        "reason": False,
        "given": {"run": run.id},
        "command": "keepstep signal {run} {name} {payload}",
        "done": "The signal was sent",
    }


def _recover(run: Run) -> dict[str, Any]:
    return _act(
        run,
        "recover",
        "Recover…",
        "Let the next worker recover the run. Below is what that would do.",
        title=f"Recover {run.id}",
        verb="Recover",
        role="admin",
        fields=[{"name": "handler", "label": "Recovery handler", "help": "Leave it empty for the usual recovery."}],
        dry={"dry_run": True},
        command="keepstep recover {run}[ --handler {handler}][ --reason {reason}]",
    )
