"""From a checkpoint's tensors to the decoder's parameters, packed and sharded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from checkpoint.errors import CheckpointError
from checkpoint.tensor_reader import NotFinite, cast
from engine.kernels.interface import Kernels, Linear
from engine.kernels.quantized import Quantized, quantize
from engine.layer_stack import LayerStack, MemoryGate
from engine.models.decoder import Params
from engine.models.heads import NO_HEAD, HeadLayout, UnsupportedParallelism, lay_out_heads
from engine.models.rope import query_scales, rope_angles
from engine.models.traits import Traits
from engine.models.weights import Kind, Weight, bias_of, declare_weights
from engine.sharding import TABLE, sharding_of

ReadTensor = Callable[[str], np.ndarray]
"""Tensor name → its whole value, in any dtype; called from several threads."""

Matrix = np.ndarray | Quantized
"""One weight of one layer, on the host."""

Axes = tuple[str | None, ...]

_PACKERS = 4
"""Threads that convert and pack; as many layers are in memory as the largest tensor would fill."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How one model is laid out over a mesh, for one set of kernels.

    Attributes:
        traits: of the whole model.
        shard: what one device computes of it.
        heads: which head lies where.
        dtype: of the activations.
    """

    mesh: Mesh
    kernels: Kernels
    traits: Traits
    shard: Traits
    heads: HeadLayout
    dtype: np.dtype

    @property
    def shards(self) -> int:
        return self.mesh.size

    @property
    def pool_heads(self) -> int:
        """KV heads of the pools of all shards."""
        return len(self.heads.kv)

    @property
    def kv_places(self) -> tuple[int, ...]:
        """Where in the pools each of the model's KV heads lies."""
        return self.heads.kv_places(self.traits.kv_heads)


def plan_placement(traits: Traits, kernels: Kernels, mesh: Mesh, dtype: Any) -> Placement:
    """Divide a model whose weights are of `dtype` over the devices of `mesh`.

    Raises:
        UnsupportedParallelism: heads or widths do not divide.
        UnsupportedShape: the kernels do not compute a shard of this size.
    """
    shards = mesh.size
    heads = lay_out_heads(traits.heads, traits.kv_heads, shards)
    for field, width in mlp_widths(traits).items():
        if width % shards:
            raise UnsupportedParallelism(
                f"--tensor_parallel_size={shards} does not divide {field}={width}"
            )
    experts = traits.experts and dataclasses.replace(
        traits.experts,
        ffn=traits.experts.ffn // shards,
        shared_ffn=traits.experts.shared_ffn and traits.experts.shared_ffn // shards,
    )
    shard = dataclasses.replace(
        traits,
        heads=len(heads.q) // shards,
        kv_heads=len(heads.kv) // shards,
        ffn=traits.ffn // shards,
        experts=experts,
    )
    for width in mlp_widths(shard).values():
        kernels.check(
            np.dtype(dtype), heads=shard.heads, kv_heads=shard.kv_heads, head_dim=shard.head_dim,
            hidden=shard.hidden, ffn=width,
        )  # fmt: skip
    return Placement(mesh, kernels, traits, shard, heads, np.dtype(dtype))


def mlp_widths(traits: Traits) -> dict[str, int]:
    """The widths of a model's MLPs, by what a person may know them as."""
    widths = {}
    if not all(kind.experts for kind in traits.kinds):
        widths["intermediate_size"] = traits.ffn
    if (experts := traits.experts) is not None:
        widths["the experts' intermediate_size"] = experts.ffn
        if experts.shared_ffn is not None:
            widths["the shared expert's intermediate_size"] = experts.shared_ffn
    return widths


def place_params(
    placement: Placement,
    read: ReadTensor,
    dtype: Any,
    positions: int,
    quantization: str = "none",
) -> Params:
    """Read, convert, pack and place every weight, and the rotary table of `positions`.

    Args:
        dtype: of the activations, and of the weights that are not quantized.
        quantization: "none", or "int8" for the matrices of matmuls, embedding and head.

    Raises:
        CheckpointError: a matrix to quantize holds NaN or infinity; names it.
    """
    declared = declare_weights(placement.traits)
    params: Params = {}
    dtype = np.dtype(dtype)
    largest = max(math.prod(weight.shape) for weight in declared.values()) * dtype.itemsize
    with ThreadPoolExecutor(_PACKERS) as packers:
        gate = MemoryGate(largest)
        placer = _Placer(placement, read, dtype, quantization == "int8", packers, gate)
        for name, weight in declared.items():
            if weight.kind in (Kind.LINEAR, Kind.ROUTER, Kind.HEAD):
                params[name] = placer.linear(weight, declared.get(bias_of(name)))
            elif weight.kind is not Kind.BIAS:
                params[name] = placer.plain(weight)
    params |= _position_tables(placement, positions)
    for array in jax.tree.leaves(jax.block_until_ready(params)):
        placement.kernels.settle(array)
    return params


def _position_tables(placement: Placement, positions: int) -> Params:
    """The angles of each of the model's rotary embeddings, and the scales of its queries."""
    traits, mesh = placement.traits, placement.mesh
    by_position = sharding_of(("position", "head_dim"), mesh)
    angles = (rope_angles(rope, positions) for rope in traits.ropes)
    tables: Params = {"angles": tuple(jax.device_put(each, by_position) for each in angles)}
    for temperature in {kind.temperature for kind in traits.kinds}:
        if temperature is not None:
            scales = query_scales(temperature, positions)
            tables["query_scales"] = jax.device_put(scales, sharding_of(("position",), mesh))
    return tables


@dataclass(frozen=True, slots=True)
class _Placer:
    placement: Placement
    read: ReadTensor
    dtype: np.dtype
    quantized: bool
    packers: ThreadPoolExecutor
    gate: MemoryGate

    def plain(self, weight: Weight) -> Any:
        if weight.kind is Kind.EMBEDDING:
            return self._whole(weight, lambda array: array, weight.axes, weight.axes[:1])
        return self._layers(weight, lambda array: array, weight.axes)

    def linear(self, weight: Weight, bias: Weight | None) -> Linear:
        kernels, parts = self.placement.kernels, self._parts(weight.axes[0])
        features = self._width(weight, 0) // parts
        scale_axes = weight.axes[:1]
        if weight.kind is Kind.HEAD:
            matrix = self._whole(
                weight,
                lambda array: kernels.pack_head(array, parts),
                kernels.head_axes(),
                scale_axes,
            )
            return Linear(matrix, None, features)
        axes = kernels.packed_axes(*weight.axes)
        matrix = self._layers(
            weight, lambda array: kernels.pack_linear(array, parts), axes, scale_axes
        )
        return Linear(matrix, None if bias is None else self._bias(weight, bias), features)

    def _bias(self, weight: Weight, bias: Weight) -> Array:
        out, into = weight.axes
        if self._parts(into) == 1:
            return self._layers(bias, lambda array: array, (out,))
        # The shards' results are summed: the first one alone adds the bias.
        zeros = (self.placement.shards - 1) * self._width(bias, 0)
        return self._layers(bias, lambda array: np.pad(array, (0, zeros)), ("partial_sum",))

    def _whole(
        self, weight: Weight, pack: Callable[[np.ndarray], np.ndarray], axes: Axes, scale_axes: Axes
    ) -> Any:
        """On the devices; `scale_axes` are those of a quantized matrix's scales."""
        matrix = self._packed(weight, weight.source, pack)
        placed = [
            jax.block_until_ready(jax.device_put(part, self._sharding(part_axes)))
            for part, part_axes in zip(_parts(matrix), (axes, scale_axes), strict=False)
        ]
        return self._join(placed)

    def _layers(
        self,
        weight: Weight,
        pack: Callable[[np.ndarray], np.ndarray],
        axes: Axes,
        scale_axes: Axes = (),
    ) -> Any:
        """[*weight.stack, ...] on the devices; axes are those of one tensor."""
        names, stacked = weight.source_names(), ("layer", "expert")[: len(weight.stack)]
        first = self._packed(weight, names[0], pack)
        stacks = [
            LayerStack(weight.stack, part.shape, part.dtype, self._sharding((*stacked, *part_axes)))
            for part, part_axes in zip(_parts(first), (axes, scale_axes), strict=False)
        ]
        places = list(np.ndindex(*weight.stack))

        def put(index: int, matrix: Matrix) -> None:
            for stack, part in zip(stacks, _parts(matrix), strict=True):
                stack.put(places[index], part)

        def load(index: int) -> None:
            # As read and converted, or converted and packed: two copies at once.
            with self.gate.hold(2 * math.prod(weight.shape) * self.dtype.itemsize):
                put(index, self._packed(weight, names[index], pack))

        put(0, first)
        del first
        list(self.packers.map(load, range(1, len(names))))
        return self._join([stack.array() for stack in stacks])

    def _join(self, parts: list[Array]) -> Array | Quantized:
        """The inverse of `_parts`."""
        values, *scales = parts
        return Quantized(values, scales[0], self.dtype) if scales else values

    def _sharding(self, axes: Axes) -> NamedSharding:
        return sharding_of(axes, self.placement.mesh)

    def _parts(self, axis: str) -> int:
        return 1 if TABLE[axis] is None else self.placement.shards

    def _width(self, weight: Weight, dimension: int) -> int:
        """The size of a dimension once heads and vocabulary are arranged for the shards."""
        heads, axis = self.placement.heads, weight.axes[dimension]
        if axis in ("heads", "kv_heads"):
            places = heads.q if axis == "heads" else heads.kv
            return len(places) * self.placement.traits.head_dim
        parts = self._parts(axis)
        return -(-weight.shape[dimension] // parts) * parts

    def _packed(
        self, weight: Weight, name: str, pack: Callable[[np.ndarray], np.ndarray]
    ) -> Matrix:
        """One tensor, arranged, quantized if it is to be, and packed."""
        quantized = self.quantized and weight.kind in (Kind.LINEAR, Kind.EMBEDDING, Kind.HEAD)
        try:
            if quantized:
                matrix = quantize(self._arrange(weight, self.read(name)), self.dtype)
                return Quantized(pack(matrix.values), matrix.scales, matrix.dtype)
            dtype = np.dtype(np.float32) if weight.wide else self.dtype
            return pack(self._arrange(weight, cast(self.read(name), dtype)))
        except NotFinite as error:
            raise CheckpointError(f"{name}: {error}") from error

    def _arrange(self, weight: Weight, array: np.ndarray) -> np.ndarray:
        """Heads in the order of the shards; a vocabulary filled up with zeros."""
        heads, width = self.placement.heads, self.placement.traits.head_dim
        for dimension, axis in enumerate(weight.axes):
            if axis == "heads":
                array = _take_heads(array, dimension, heads.q, width)
            elif axis == "kv_heads":
                array = _take_heads(array, dimension, heads.kv, width)
            elif missing := self._width(weight, dimension) - array.shape[dimension]:
                padding = [(0, 0)] * array.ndim
                padding[dimension] = (0, missing)
                array = np.pad(array, padding)
        return array


def _parts(matrix: Matrix) -> tuple[np.ndarray, ...]:
    return (matrix.values, matrix.scales) if isinstance(matrix, Quantized) else (matrix,)


def _take_heads(
    array: np.ndarray, dimension: int, places: tuple[int, ...], width: int
) -> np.ndarray:
    """The heads along one dimension, in the order of `places`; zeros for NO_HEAD."""
    count = array.shape[dimension] // width
    if places == tuple(range(count)):
        return array
    shape = array.shape
    split = array.reshape(*shape[:dimension], count, width, *shape[dimension + 1 :])
    taken = np.take(split, [max(place, 0) for place in places], axis=dimension)
    empty = np.array([place == NO_HEAD for place in places])
    taken[(slice(None),) * dimension + (empty,)] = 0
    return taken.reshape(*shape[:dimension], len(places) * width, *shape[dimension + 1 :])
