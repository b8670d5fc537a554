"""The PostgreSQL store: the contract, and what only it does."""

from __future__ import annotations

import pytest

from keepstep.stores.postgres import PostgresStore
from keepstep.testing.store_contract import StoreContract
from tests.postgres import empty_store


class Attentive(PostgresStore):
    """A store that has told what it wrote before it answers, and has heard what others told before it gives news."""

    def commit(self, changes, *, wait=True):
        answers = super().commit(changes, wait=wait)
        self._presence.ask(lambda connection: None)
        return answers

    def news(self, worker, cursor):
        self._presence.ask(lambda connection: connection.execute("SELECT 1"))
        return super().news(worker, cursor)


@pytest.fixture
def url():
    with empty_store() as url:
        yield url


class TestContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, url):
        self.url = url

    def make_store(self, clock):
        return Attentive(self.url, clock=clock)
