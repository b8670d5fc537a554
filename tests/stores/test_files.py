"""The store in files: the contract, and what is its own."""

from __future__ import annotations

import pytest

from keepstep.stores.files import FilesStore
from keepstep.testing.store_contract import StoreContract


class TestFiles(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "runs"

    def make_store(self, clock):
        return FilesStore(self.path, clock=clock, power_loss="may_lose_last")
