"""How arrays lie on the devices: logical axes, and the table that maps them to a mesh."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MODEL_AXIS = "model"
"""The mesh axis of tensor parallelism."""

TABLE: dict[str | None, str | None] = {
    "layer": None,
    "vocab": MODEL_AXIS,
    "hidden": None,
    "heads": MODEL_AXIS,
    "kv_heads": MODEL_AXIS,
    "head_dim": None,
    "ffn": MODEL_AXIS,
    "expert": None,  # every shard has a slice of each
    "blocks": None,
    "block": None,
    "position": None,
    "partial_sum": MODEL_AXIS,  # one part of a sum on each shard
    None: None,
}
"""Logical axis → mesh axis; None is replicated."""


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A one-axis mesh over `devices`."""
    return Mesh(np.asarray(devices), (MODEL_AXIS,))


def copies_directly(array: jax.Array, target: NamedSharding) -> bool:
    """Whether `device_put` to `target` only copies what one device has to another one.

    Other moves cut and join the pieces: jax compiles a program for that, or goes by the host.
    """
    if array.sharding.is_fully_replicated:
        return target.is_fully_replicated
    shape = array.sharding.shard_shape(array.shape)
    return shape == target.shard_shape(array.shape)


def views_directly(array: jax.Array, target: NamedSharding) -> bool:
    """Whether a program on the one device of `target` reads `array` where it lies, by the host.

    Virtual CPU devices share their memory; `device_put` would copy from one to another.
    """
    if array.sharding.num_devices != 1 or target.num_devices != 1:
        return False
    (here,), (there,) = array.devices(), target.mesh.devices.flat
    return here.platform == there.platform == "cpu"


def sharding_of(axes: Sequence[str | None], mesh: Mesh) -> NamedSharding:
    """The sharding of an array with these logical axes.

    Raises:
        KeyError: an axis is not in the table.
        ValueError: two axes of one array map to the same mesh axis.
    """
    mapped = [TABLE[axis] for axis in axes]
    used = [axis for axis in mapped if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {tuple(axes)} use a mesh axis twice: {mapped}")
    return NamedSharding(mesh, PartitionSpec(*mapped))
