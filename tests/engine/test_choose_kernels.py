"""Which kernels run where, and what is said when they cannot."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jaxlib
import pytest

from engine.kernels.choose import KernelsUnavailable, choose_kernels
from engine.kernels.cpu import native
from engine.kernels.cpu.build_facts import headers_hash, sources_hash

MODULE = "engine.kernels.cpu._native"


@pytest.fixture(autouse=True)
def _loaded_anew() -> Iterator[None]:
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setitem(sys.modules, MODULE, module)


def a_build(**changes: Any) -> SimpleNamespace:
    """A native module that fits this jaxlib and these sources, but for `changes`."""
    facts: dict[str, Any] = {
        "jaxlib_version": jaxlib.__version__,
        "jaxlib_hash": headers_hash(),
        "sources_hash": sources_hash(),
        "instruction_sets": list,
        "self_check": lambda name: True,
        "use_instruction_set": lambda name: None,
        "handlers": dict,
    }
    return SimpleNamespace(**facts | changes)


def test_the_best_kernels_of_this_processor_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hexserve.engine"):
        kernels = choose_kernels("cpu", "auto")
    assert kernels.name == f"cpu ({native.load().instruction_sets()[0]})"
    assert f"kernels: {kernels.name}" in caplog.text
    assert choose_kernels("cpu", "cpu").name == kernels.name


@pytest.mark.parametrize(("platform", "asked"), [("cpu", "reference"), ("tpu", "auto")])
def test_the_reference_runs_where_it_is_asked_for(platform: str, asked: str) -> None:
    assert choose_kernels(platform, asked).name == "reference"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "the CPU kernels are not built"),
        (a_build(), "need AVX2 and FMA, this processor has not both"),
    ],
)
def test_without_cpu_kernels_the_reference_runs_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    reason: str,
) -> None:
    pretend(monkeypatch, module)
    assert choose_kernels("cpu", "auto").name == "reference"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert reason in warning.message
    assert "slow reference kernels" in warning.message
    with pytest.raises(KernelsUnavailable, match=f"--kernels=cpu: .*{reason}"):
        choose_kernels("cpu", "cpu")


def test_an_instruction_set_that_multiplies_wrong_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[str] = []
    module = a_build(
        instruction_sets=lambda: ["amx", "avx512bf16", "avx2"],
        self_check=lambda name: name != "amx",
        use_instruction_set=used.append,
        instruction_set=lambda: used[-1],
    )
    pretend(monkeypatch, module)
    assert choose_kernels("cpu", "auto").name == "cpu (avx512bf16)"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "for amx multiply wrong" in warning.message


def test_kernels_that_all_multiply_wrong_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = a_build(instruction_sets=lambda: ["avx512", "avx2"], self_check=lambda name: False)
    pretend(monkeypatch, wrong)
    with pytest.raises(KernelsUnavailable, match=r"--kernels=cpu: .* multiply wrong on this"):
        choose_kernels("cpu", "cpu")


@pytest.mark.parametrize("asked", ["auto", "cpu"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jaxlib_hash": "0", "jaxlib_version": "0.0.1"}, r"built for jaxlib 0\.0\.1, .*: rebuild"),
        ({"sources_hash": "0"}, "sources have changed since they were built: rebuild"),
    ],
)
def test_kernels_of_another_build_are_refused(
    monkeypatch: pytest.MonkeyPatch, asked: str, changes: dict[str, str], reason: str
) -> None:
    pretend(monkeypatch, a_build(instruction_sets=lambda: ["avx2"], **changes))
    with pytest.raises(KernelsUnavailable, match=reason):
        choose_kernels("cpu", asked)


def test_cpu_kernels_do_not_run_on_other_devices() -> None:
    with pytest.raises(KernelsUnavailable, match="--kernels=cpu: the devices are tpu"):
        choose_kernels("tpu", "cpu")
