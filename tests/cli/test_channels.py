"""`channels`: what there is, and a test of one."""

from __future__ import annotations

import pytest

from keepstep.workflows.channel import CHANNELS
from keepstep.workflows.definition import KNOWN

PROGRAM = """
import keepstep as ks

def tell(digest):
    with open("told", "a") as out:
        out.write(digest["notices"][0]["text"])

ks.Channel("ops", notify=tell, gather=0.1)

@ks.workflow
async def fine():
    pass
"""


@pytest.fixture(autouse=True)
def _no_channels():
    yield
    for one in CHANNELS.values():
        KNOWN.pop(one.delivery.name, None)
    CHANNELS.clear()


def test_channels_are_listed_and_tested(keepstep, folder):
    (folder / "told.py").write_text(PROGRAM, encoding="utf-8")
    assert keepstep("run", "told.py:fine").code == 0
    idle = {"gathered": 0, "delivered": 0, "deliveries": 0, "open": None}
    idle |= {"undelivered": 0, "failures": 0, "failed": []}
    assert keepstep("channels", "--json").json["channels"] == [
        {"channel": "ops", "status": "waiting", "attended": False, **idle}
    ]
    assert keepstep("doctor", "--strict").code == 0, "an idle channel needs no worker"
    assert keepstep("channels", "test", "ops", "hello Ann", "--json").json == {"channel": "ops", "sent": True}
    (gathered,) = [one["code"] for one in keepstep("doctor", "--json").json["findings"]]
    assert gathered == "channel-unattended"
    assert keepstep("worker", "told.py", "--until-idle", "-q").code == 0
    wait_until_told(folder, keepstep)
    assert (folder / "told").read_text(encoding="utf-8") == "hello Ann"
    assert "no worker declares it" in keepstep("channels").out


def test_a_failed_delivery_is_shown(keepstep, folder):
    failing = PROGRAM.replace('with open("told", "a") as out:', "raise ks.Permanent('no')").split("        out.write")[
        0
    ]
    (folder / "told.py").write_text(failing + PROGRAM.split('["text"])')[1], encoding="utf-8")
    assert keepstep("run", "told.py:fine").code == 0
    keepstep("channels", "test", "ops")
    for _ in range(50):
        keepstep("worker", "told.py", "--until-idle", "-q")
        shown = keepstep("channels").out
        if "1 delivery has failed" in shown:
            break
    assert "keepstep show keepstep.deliver:ops:1 tells why" in shown
    assert keepstep("channels", "--json").json["channels"][0]["failed"] == ["keepstep.deliver:ops:1"]


def wait_until_told(folder, keepstep):
    """A worker that is idle may leave before the time of the channel has come; the next one goes on."""
    for _ in range(50):
        if (folder / "told").exists():
            return
        assert keepstep("worker", "told.py", "--until-idle", "-q").code == 0


def test_wrong_names_are_refused(keepstep):
    keepstep("run", "program.py:total", "1")
    unknown = keepstep("channels", "test", "nobody")
    assert (unknown.code, "no channel 'nobody'" in unknown.err) == (3, True)
    assert keepstep("channels", "test").code == 2
    assert keepstep("channels", "list", "ops", "text").code == 2
    assert keepstep("channels").out.startswith("no channel")
