"""Arrays that hold one tensor of every layer, filled layer by layer where they will stay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from checkpoint.host_array import empty_pages


class MemoryGate:
    """Bounds the bytes that several threads hold at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._freed = threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait until `size` more bytes may be held; one thread alone always may."""
        with self._freed:
            self._freed.wait_for(lambda: not self._held or self._held + size <= self._most)
            self._held += size
        try:
            yield
        finally:
            with self._freed:
                self._held -= size
                self._freed.notify_all()


class LayerStack:
    """An array [*stack, *shape] on a mesh; `stack` is (layers,), or has more dimensions.

    `put` each tensor once, from any thread; then take `array`. No copy of the whole is made on
    the host, and on a device none of more than one tensor: where the devices are cores, tensors
    are put straight into the memory that jax will read.
    """

    def __init__(
        self,
        stack: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: Any,
        sharding: NamedSharding,
    ) -> None:
        """`sharding` is that of the whole array, which is not divided along `stack`."""
        whole = (*stack, *shape)
        on_host = sharding.mesh.devices.flat[0].platform == "cpu"
        kind = _HostStack if on_host else _DeviceStack
        self._stack: _HostStack | _DeviceStack = kind(whole, len(stack), np.dtype(dtype), sharding)

    def put(self, place: tuple[int, ...], value: np.ndarray) -> None:
        """Copy `value` [*shape] to its place in the stack."""
        self._stack.put(place, value)

    def array(self) -> Array:
        """The array; every tensor has been put."""
        return self._stack.array()


class _HostStack:
    """Shards in this process's memory, which jax takes over as they are."""

    def __init__(
        self, shape: tuple[int, ...], stacked: int, dtype: np.dtype[Any], sharding: NamedSharding
    ) -> None:
        self._shape = shape
        self._sharding = sharding
        indices = sharding.addressable_devices_indices_map(shape)
        shard_shape = sharding.shard_shape(shape)
        self._shards = {device: empty_pages(shard_shape, dtype) for device in indices}
        self._slices = {
            device: index[stacked:] for device, index in indices.items() if index is not None
        }

    def put(self, place: tuple[int, ...], value: np.ndarray) -> None:
        for device, shard in self._shards.items():
            np.copyto(shard[place], value[self._slices[device]])

    def array(self) -> Array:
        placed = [jax.device_put(shard, device) for device, shard in self._shards.items()]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, placed)


class _DeviceStack:
    """Shards in the devices' own memory; each tensor is sent in its shards and copied there."""

    def __init__(
        self, shape: tuple[int, ...], stacked: int, dtype: np.dtype[Any], sharding: NamedSharding
    ) -> None:
        self._sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[stacked:]))
        self._array = jnp.zeros(shape, dtype, device=sharding)
        self._lock = threading.Lock()

    def put(self, place: tuple[int, ...], value: np.ndarray) -> None:
        sent = jax.device_put(value, self._sharding)
        with self._lock:
            # Each copy is awaited, or tensors would pile up in front of a busy device.
            self._array = jax.block_until_ready(_set(self._array, place, sent))

    def array(self) -> Array:
        return self._array


@partial(jax.jit, donate_argnums=0)
def _set(stack: Array, place: tuple[Any, ...], value: Array) -> Array:
    start = (*place, *(0,) * value.ndim)
    return lax.dynamic_update_slice(stack, value.reshape((1,) * len(place) + value.shape), start)
