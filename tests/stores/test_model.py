"""The model of a store keeps the contract that it stands for."""

from __future__ import annotations

import pytest

from keepstep.testing.store_contract.claiming import Claiming
from keepstep.testing.store_contract.keeping import Keeping
from keepstep.testing.store_contract.reading import Reading
from keepstep.testing.store_contract.waking import Waking
from keepstep.testing.store_contract.writing import Writing
from tests.stores.model import ModelStore


class TestContract(Writing, Waking, Claiming, Reading, Keeping):
    """All of the contract but queues with limits, which have a model of their own."""

    @pytest.fixture(autouse=True)
    def _nothing_yet(self):
        self.made = None

    def make_store(self, clock):
        if self.made is None:  # the contents live as long as the object
            self.made = ModelStore(clock=clock)
        return self.made
