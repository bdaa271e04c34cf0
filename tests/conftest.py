"""Options of the whole test run, and the virtual devices of its process."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native", type=Path, help="folder of another build of the CPU kernels")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--native")
    if folder is not None:
        import engine.kernels.cpu

        engine.kernels.cpu.__path__.insert(0, str(folder.resolve()))
