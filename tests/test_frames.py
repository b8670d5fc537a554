"""The user's own lines are found in a stored traceback, whatever else stands in it."""

from __future__ import annotations

import asyncio
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model import ErrorInfo
from keepstep.model.frames import MAX_FRAMES, add_note, own_frames

OWN = '  File "/app/shop.py", line 12, in charge\n    return pay(order)\n'
STDLIB = '  File "/usr/lib/python3.12/asyncio/tasks.py", line 500, in wait_for\n    return await fut\n'
PACKAGE = '  File "/app/.venv/lib/python3.12/site-packages/httpx/_api.py", line 3, in get\n    return request()\n'
KEEPSTEP = (
    '  File "/app/.venv/lib/python3.12/site-packages/keepstep/kernel/step.py", line 140, in execute\n    await fn()\n'
)


def text(*frames, last="ValueError: no\n"):
    return "Traceback (most recent call last):\n" + "".join(frames) + last


def lines_of(frames):
    return [(frame.function, frame.source) for frame in frames]


def test_frames_of_keepstep_packages_and_the_standard_library_are_left_out():
    found = own_frames(text(KEEPSTEP, OWN, PACKAGE, STDLIB))
    assert found == (("/app/shop.py", 12, "charge", "return pay(order)"),)


def test_installed_application_has_frames_too():
    assert lines_of(own_frames(text(KEEPSTEP, PACKAGE, STDLIB))) == [("get", "return request()")]


def test_traceback_without_own_frames_has_none():
    assert own_frames(text(KEEPSTEP, STDLIB)) == ()
    assert ErrorInfo("ValueError", "an older record without a traceback").frames == ()


def test_last_exception_of_a_chain_counts():
    cause = text(OWN.replace("charge", "first"))
    assert lines_of(own_frames(f"{cause}\nThe above exception was the direct cause\n\n{text(OWN)}"))[0][0] == "charge"
    wrapped = f"{cause}\nThe above exception was the direct cause\n\n{text(KEEPSTEP)}"
    assert lines_of(own_frames(wrapped))[0][0] == "first"


def test_carets_and_repetitions_are_no_source():
    carets = text('  File "/app/a.py", line 1, in f\n', "    ^^^^\n  [Previous line repeated 990 more times]\n")
    assert own_frames(text('  File "/app/a.py", line 1, in f\n', OWN))[0].source == ""
    assert own_frames(carets)[0].line == 1


def test_outermost_and_innermost_frames_are_kept():
    many = [OWN.replace("12", str(number)) for number in range(1, 100)]
    found = own_frames(text(*many))
    assert len(found) == MAX_FRAMES
    assert (found[0].line, found[-1].line) == (1, 99)


def test_real_traceback_of_a_group_has_the_lines_of_its_task():
    async def fails():
        raise ValueError("no")

    async def both():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(both())
    found = own_frames("".join(traceback.format_exception(caught.value)))
    assert lines_of(found) == [("fails", 'raise ValueError("no")')]


@given(st.text(alphabet=' |+\nFile"Traceback(most recent call last):,123in'), st.text())
def test_hostile_text_never_raises(noise, tail):
    own_frames(noise + text(OWN) + tail + noise)
    own_frames(f'  File "{tail}", line {"9" * 5000}, in {noise}')


def test_note_is_added_to_a_frozen_exception():
    class Frozen(Exception):
        def __setattr__(self, name, value):
            raise TypeError("frozen")

    error = Frozen()
    add_note(error, "here")
    assert error.__notes__ == ["here"]


@pytest.mark.parametrize(
    "kind, summary",
    [
        ("shop.Refused", "shop.Refused: no"),
        ("ValueError", "ValueError: no"),
        ("keepstep.errors.NotSerializable", "NotSerializable: no"),
        ("keepstep.errors.StepFailed", "no"),
        ("keepstep.errors.ExecutionError", "no"),
    ],
)
def test_summary_has_no_prefix_that_the_message_repeats(kind, summary):
    assert ErrorInfo(kind, "no").summary == summary


def test_generated_methods_of_a_dataclass_are_left_out():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/opt/flow.py", line 4, in flow\n    ks.Tolerate(share=10)\n'
        '  File "<string>", line 6, in __init__\n'
        "ValueError: no\n"
    )
    assert [frame.function for frame in own_frames(text)] == ["flow"]
