"""The implementations of the kernels, and the switches of the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from engine.kernels.choose import choose_kernels
from engine.kernels.cpu.native import NoNativeKernels, load
from engine.kernels.interface import Kernels


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


@pytest.fixture(
    scope="module",
    params=["reference", "amx", "avx512bf16", "avx512", "avx2", "amx_emulated"],
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation: the CPU's with each instruction set that runs here."""
    if request.param == "reference":
        return choose_kernels("cpu", "reference")
    native: ModuleType = request.getfixturevalue("native")
    if request.param not in (*native.instruction_sets(), "amx_emulated"):
        pytest.skip(f"this processor does not run {request.param}")
    native.use_instruction_set(request.param)
    return choose_kernels("cpu", "cpu")


@pytest.fixture(scope="module")
def cpu(kernels: Kernels) -> Kernels:
    """Those of `kernels` that are bit for bit independent of the batch."""
    if kernels.name == "reference":
        pytest.skip("the reference promises no bits")
    return kernels
