"""The description of the API is valid, names every route, and stands in the docs as it is served."""

import json
import sys
from pathlib import Path

import pytest
import schemathesis

import keepstep
from keepstep.web.openapi import description
from keepstep.web.routes import ROUTES

FILE = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"


def text():
    return json.dumps(description(keepstep.__version__), indent=1, sort_keys=True) + "\n"


def operations():
    return [one for path in description("0")["paths"].values() for one in path.values()]


def test_file_in_the_docs_is_what_is_served():
    assert FILE.read_text(encoding="utf-8") == text(), "run: python -m tests.web.test_description --write"


def test_description_is_valid():
    schemathesis.openapi.from_dict(description("0")).validate()


def test_every_route_is_described_once():
    names = [one["operationId"] for one in operations()]
    assert len(names) == len(set(names)) == len(ROUTES) + 2


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_route_has_a_summary_and_an_answer(route):
    assert route.summary.endswith(".")
    found = next(one for one in operations() if one["operationId"] == route.name)
    assert route.media_type in found["responses"][str(route.status)]["content"]


if __name__ == "__main__" and "--write" in sys.argv:
    FILE.write_text(text(), encoding="utf-8")
