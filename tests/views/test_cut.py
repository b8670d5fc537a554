"""Values without secrets: each text is searched alone, whatever its JSON text looks like."""

import json

import pytest

from keepstep.values.redact import REDACTED, Redactor
from keepstep.values.secret import Secret
from keepstep.views.cut import clean


@pytest.mark.parametrize("secret", ['s3cr"et-word', "back\\slash-word", "two\nlines-word", "plain-word"])
def test_revealed_secret_is_found_whatever_its_characters(monkeypatch, secret):
    monkeypatch.setattr(Secret, "revealed", {secret: json.dumps(secret)[1:-1].encode()})
    data = {"list": [f"it is {secret}.", 1, None], secret: {"deep": (secret, True)}}
    found = clean(data, Redactor().text)
    assert found == {"list": [f"it is {REDACTED}.", 1, None], REDACTED: {"deep": [REDACTED, True]}}


def test_match_of_a_pattern_ends_with_its_text():
    key = "-----BEGIN PRIVATE KEY-----\nabc"
    assert clean([key, "kept"], Redactor().text) == [REDACTED, "kept"]
    assert clean(["token: a", 'b"'], Redactor([r"token: .*"]).text) == [REDACTED, 'b"']


def test_data_without_secrets_stay_the_same_object():
    data = {"a": [1, "b", {"c": 2.5}]}
    assert clean(data, Redactor().text) is data


def test_revealed_secret_is_found_in_json_text(monkeypatch):
    secret = 's3cr"et\nword'
    monkeypatch.setattr(Secret, "revealed", {secret: json.dumps(secret)[1:-1].encode()})
    assert Redactor().text(json.dumps([secret, "kept"])) == '["[redacted]", "kept"]'
