"""Workflows that send requests with the libraries that people use for it."""

from __future__ import annotations

import aiohttp
import httpx
import requests

import keepstep as ks


def headers(keyed):
    return {"Idempotency-Key": ks.idempotency_key()} if keyed else {}


@ks.step
def send_with_requests(url, keyed):
    return requests.post(url, data="amount=5", headers=headers(keyed), timeout=5).status_code


@ks.workflow
async def with_requests(url: str, keyed: bool) -> int:
    return await send_with_requests(url, keyed)


@ks.step
def send_with_httpx(url, keyed):
    return httpx.post(url, json={"key": ks.idempotency_key() if keyed else "none"}).status_code


@ks.workflow
async def with_httpx(url: str, keyed: bool) -> int:
    return await send_with_httpx(url, keyed)


@ks.step(timeout=30)
async def send_with_async_httpx(url, keyed):
    async with httpx.AsyncClient() as client:
        return (await client.post(url, content="amount=5", headers=headers(keyed))).status_code


@ks.workflow
async def with_async_httpx(url: str, keyed: bool) -> int:
    return await send_with_async_httpx(url, keyed)


@ks.step
async def send_with_aiohttp(url, keyed):
    async with aiohttp.ClientSession() as session, session.post(url, data=b"x", headers=headers(keyed)) as answer:
        return answer.status


@ks.workflow
async def with_aiohttp(url: str, keyed: bool) -> int:
    return await send_with_aiohttp(url, keyed)


WORKFLOWS = {
    "requests": with_requests,
    "httpx": with_httpx,
    "async httpx": with_async_httpx,
    "aiohttp": with_aiohttp,
}
