"""The switches of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from engine.kernels.cpu.native import NoNativeKernels, load


@pytest.fixture(scope="module")
def native() -> Iterator[ModuleType]:
    """The CPU kernels' switches, put back when a module's tests are done."""
    try:
        module = load()
    except NoNativeKernels as error:
        pytest.skip(str(error))
    yield module
    module.use_instruction_set(module.instruction_sets()[0])
    module.limit_threads(0)
