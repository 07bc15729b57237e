"""The stand-in has the names, values and signatures of the real `cuda.bindings.driver`."""

from __future__ import annotations

from enum import IntEnum
from inspect import signature
from types import ModuleType

import pytest
from kvcached_core.backends.cuda import _access, _page_properties

from .fake_driver import FakeDriver, Gpu

ENUMS = [value for value in vars(FakeDriver).values() if isinstance(value, type) and issubclass(value, IntEnum)]
FUNCTIONS = [name for name in vars(FakeDriver) if name.startswith("cu")]


@pytest.fixture(scope="module")
def real() -> ModuleType:
    return pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize("enum", ENUMS)
def test_enumerations_agree(real: ModuleType, enum: type[IntEnum]) -> None:
    theirs = getattr(real, enum.__name__)
    assert {member.name: member.value for member in enum} == {m.name: int(getattr(theirs, m.name)) for m in enum}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_as_many_arguments(real: ModuleType, name: str) -> None:
    arguments = getattr(real, name).__doc__.split("\n")[0].partition("(")[2]
    bare = arguments.replace("[CUmemAccessDesc]", "").replace(", ...", "")
    assert len(signature(getattr(FakeDriver, name)).parameters) - 1 == (bare.count(",") + 1 if bare != ")" else 0)


def test_the_real_structures_take_what_the_backend_puts_in(real: ModuleType) -> None:
    for module in (real, FakeDriver):
        properties = _page_properties(module, 3)
        (access,) = _access(module, properties, module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
        assert int(properties.type) == 1
        assert (int(access.location.type), access.location.id, int(access.flags)) == (1, 3, 1)


def test_an_unmapped_address_cannot_be_touched_and_a_mapped_one_needs_access() -> None:
    driver = FakeDriver(Gpu(1 << 20))
    driver.set_device(0)
    page_bytes = driver.granularity_bytes
    _, address = driver.cuMemAddressReserve(page_bytes, 0, 0, 0)
    properties = _page_properties(driver, 0)
    _, handle = driver.cuMemCreate(page_bytes, properties, 0)
    assert (driver.can_read(address), driver.can_write(address)) == (False, False)
    driver.cuMemMap(address, page_bytes, 0, handle, 0)
    assert (driver.can_read(address), driver.can_write(address)) == (False, False)
    driver.cuMemSetAccess(address, page_bytes, _access(driver, properties, 1), 1)
    assert (driver.can_read(address), driver.can_write(address)) == (True, False)
    driver.cuMemSetAccess(address, page_bytes, _access(driver, properties, 3), 1)
    assert (driver.can_read(address), driver.can_write(address)) == (True, True)
