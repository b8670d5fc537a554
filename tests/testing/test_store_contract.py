"""The suite for stores is whole: a subclass gets the tests of every group."""

from importlib import import_module
from pkgutil import iter_modules

from keepstep.testing import store_contract
from keepstep.testing.store_contract import StoreContract
from keepstep.testing.store_contract.ground import Ground


def test_a_subclass_gets_the_tests_of_every_group():
    modules = [import_module(f"{store_contract.__name__}.{one.name}") for one in iter_modules(store_contract.__path__)]
    groups = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    groups = {group for group in groups if issubclass(group, Ground)}
    tests = [name for group in groups for name in vars(group) if name.startswith("test_")]
    assert len(groups) == 10
    assert len(tests) == len(set(tests)), "one test would hide another"
    assert {name for name in dir(StoreContract) if name.startswith("test_")} == set(tests)
