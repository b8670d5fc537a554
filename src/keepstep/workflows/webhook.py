"""The request of a channel's web hook: signed, posted once, and judged by its status."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from typing import Any
from urllib import request as urllib_request

from ..errors import Permanent
from ..ports import CURRENT
from ..values import Secret
from .files.http import UnexpectedStatus

#: Prefix of a signing secret whose rest is base64, as Standard Webhooks writes it.
_ENCODED = "whsec_"


def send(webhook: str | Secret | None, secret: Secret | None, digest: dict[str, Any], seconds: float) -> None:
    """Post a digest as JSON; raise unless the receiver answers with a status from 200 to 299."""
    url = webhook.reveal() if isinstance(webhook, Secret) else webhook or ""
    body = json.dumps(digest, ensure_ascii=False).encode("utf-8", "replace")
    headers = {"User-Agent": "keepstep", "Content-Type": "application/json; charset=utf-8"}
    headers |= signature(secret, _delivery_id(), int(time.time()), body)
    opener = urllib_request.OpenerDirector()
    for handler in (urllib_request.ProxyHandler(), urllib_request.HTTPHandler(), urllib_request.HTTPSHandler()):
        opener.add_handler(handler)
    # `Channel` has checked the scheme, except that of a secret URL; an opener without other handlers refuses those.
    answer = opener.open(urllib_request.Request(url, body, headers, method="POST"), timeout=seconds)  # noqa: S310
    if answer is None:
        raise Permanent("the webhook of the channel must be a URL that begins with https:// or http://")
    with answer:
        status = int(answer.status)
        if not 200 <= status <= 299:
            kept = {"retry-after": str(answer.headers["retry-after"])} if "retry-after" in answer.headers else {}
            raise UnexpectedStatus(f"the webhook answered {status}", status, kept)


def signature(secret: Secret | None, delivery: str, at: int, body: bytes) -> dict[str, str]:
    """Return the headers that identify a delivery, and its signature by HMAC-SHA256 if there is a secret."""
    headers = {"webhook-id": delivery, "webhook-timestamp": str(at)}
    if secret is not None:
        text = secret.reveal()
        try:
            key = base64.b64decode(text.removeprefix(_ENCODED)) if text.startswith(_ENCODED) else text.encode()
        except binascii.Error:
            raise Permanent(f"the secret {secret.name!r} begins with {_ENCODED}, but its rest is not base64") from None
        signed = hmac.new(key, f"{delivery}.{at}.".encode() + body, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
    return headers


def _delivery_id() -> str:
    """Return an id that stays the same over all attempts, so that a receiver can tell repetitions."""
    scope = CURRENT.get()
    return "" if scope is None else scope.idempotency_key()
