"""Stacks of layers: put where they stay, on every kind of device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoint.host_array import HUGE_PAGE
from engine import layer_stack
from engine.layer_stack import LayerStack, MemoryGate
from engine.sharding import make_mesh, sharding_of

SHAPE = (8, 6)


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("axes", [("ffn", "hidden"), ("hidden", "heads"), ("hidden", None)])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("stack", [(6,), (2, 3)])
def test_every_layer_is_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: Any,
    axes: tuple[str, ...],
    shards: int,
    stack: tuple[int, ...],
) -> None:
    if kind == "device":  # as accelerators have it, by copies on the device
        monkeypatch.setattr(layer_stack, "_HostStack", layer_stack._DeviceStack)
    sharding = sharding_of(("layer", None)[: len(stack)] + axes, make_mesh(jax.devices()[:shards]))
    layers = LayerStack(stack, SHAPE, dtype, sharding)
    values = np.arange(6 * 48).reshape(*stack, *SHAPE).astype(dtype)
    places = list(np.ndindex(stack))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda place: layers.put(place, values[place]), places[3:] + places[:3]))
    array = layers.array()
    assert (array.sharding, array.dtype) == (sharding, dtype)
    np.testing.assert_array_equal(np.asarray(array), values)


def test_jax_takes_the_hosts_memory_over_as_it_is() -> None:
    sharding = sharding_of(("layer", "hidden"), make_mesh(jax.devices()[:1]))
    stack = LayerStack((2,), (HUGE_PAGE // 4,), np.float32, sharding)
    (shard,) = stack._stack._shards.values()
    stack.put((0,), np.ones(HUGE_PAGE // 4, np.float32))
    stack.put((1,), np.zeros(HUGE_PAGE // 4, np.float32))
    array = stack.array()
    assert array.addressable_data(0).unsafe_buffer_pointer() == shard.ctypes.data
    del stack, shard
    assert np.asarray(array).sum(axis=1).tolist() == [HUGE_PAGE // 4, 0]


def test_the_gate_bounds_what_is_held_at_once() -> None:
    gate, lock = MemoryGate(10), threading.Lock()
    held = most = 0

    def hold(size: int) -> None:
        nonlocal held, most
        with gate.hold(size):
            with lock:
                held += size
                most = max(most, held)
            with lock:
                held -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, [4, 6, 3, 5] * 50))
    assert most <= 10


def test_the_gate_lets_one_through_that_is_too_large_alone() -> None:
    gate, inside = MemoryGate(10), threading.Event()
    with gate.hold(50):
        thread = threading.Thread(target=lambda: _enter(gate, inside))
        thread.start()
        assert not inside.wait(0.05)
    thread.join()
    assert inside.is_set()


def test_the_gate_opens_again_after_a_failure() -> None:
    gate = MemoryGate(10)
    with pytest.raises(ZeroDivisionError), gate.hold(10):
        1 / 0  # noqa: B018
    with gate.hold(10):
        pass


def _enter(gate: MemoryGate, inside: threading.Event) -> None:
    with gate.hold(1):
        inside.set()
