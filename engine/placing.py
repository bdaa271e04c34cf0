"""From a checkpoint's tensors to the decoder's parameters, packed and sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from checkpoint.errors import CheckpointError
from engine.kernels.interface import Kernels, Linear
from engine.kernels.quantized import NotFinite, Quantized, quantize
from engine.models.decoder import Params
from engine.models.heads import NO_HEAD, HeadLayout, UnsupportedParallelism, lay_out_heads
from engine.models.rope import query_scales, rope_angles
from engine.models.traits import Traits
from engine.models.weights import Kind, Weight, bias_of, declare_weights
from engine.sharding import TABLE, sharding_of

ReadTensor = Callable[[str], np.ndarray]
"""Tensor name → its whole value, in any dtype; called from several threads."""

Matrix = np.ndarray | Quantized
"""One weight of one layer, or of all layers."""

_READERS = 4


@dataclass(frozen=True, slots=True)
class Placement:
    """How one model is laid out over a mesh, for one set of kernels.

    Attributes:
        traits: of the whole model.
        shard: the same, with one device's heads.
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
    widths = mlp_widths(traits)
    for field, width in widths.items():
        if width % shards:
            raise UnsupportedParallelism(
                f"--tensor_parallel_size={shards} does not divide {field}={width}"
            )
    shard = dataclasses.replace(
        traits, heads=len(heads.q) // shards, kv_heads=len(heads.kv) // shards
    )
    for width in widths.values():
        kernels.check(
            np.dtype(dtype), heads=shard.heads, kv_heads=shard.kv_heads, head_dim=shard.head_dim,
            hidden=shard.hidden, ffn=width // shards,
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
    with ThreadPoolExecutor(_READERS) as readers:
        placer = _Placer(placement, read, np.dtype(dtype), quantization == "int8", readers)
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
    for temperature in {kind.temperature for kind in traits.kinds} - {None}:
        scales = query_scales(temperature, positions)
        tables["query_scales"] = jax.device_put(scales, sharding_of(("position",), mesh))
    return tables


@dataclass(frozen=True, slots=True)
class _Placer:
    placement: Placement
    read: ReadTensor
    dtype: np.dtype
    quantized: bool
    readers: ThreadPoolExecutor

    def plain(self, weight: Weight) -> Any:
        stacked = self._stack(weight, lambda array: array)
        if weight.kind is Kind.EMBEDDING:
            return self._put(stacked[0], weight.axes, weight.axes[:1])
        return self._put(stacked, ("layer", *weight.axes))

    def linear(self, weight: Weight, bias: Weight | None) -> Linear:
        kernels, parts = self.placement.kernels, self._parts(weight.axes[0])
        features = self._width(weight, 0) // parts
        if weight.kind is Kind.HEAD:
            packed = self._stack(weight, lambda array: kernels.pack_head(array, parts))[0]
            matrix = self._put(packed, kernels.head_axes(), weight.axes[:1])
            return Linear(matrix, None, features)
        packed = self._stack(weight, lambda array: kernels.pack_linear(array, parts))
        stack = ("layer", "expert")[: len(weight.stack)]
        axes = (*stack, *kernels.packed_axes(*weight.axes))
        matrix = self._put(packed, axes, (*stack, *weight.axes[:1]))
        return Linear(matrix, None if bias is None else self._bias(weight, bias), features)

    def _bias(self, weight: Weight, bias: Weight) -> Array:
        out, into = weight.axes
        whole = np.asarray(self._stack(bias, lambda array: array))
        if self._parts(into) == 1:
            return self._put(whole, ("layer", out))
        # The shards' results are summed: the first one alone adds the bias.
        first_only = np.zeros((len(whole), whole.shape[1] * self.placement.shards), whole.dtype)
        first_only[:, : whole.shape[1]] = whole
        return self._put(first_only, ("layer", "partial_sum"))

    def _put(
        self, matrix: Matrix, axes: tuple[str | None, ...], scale_axes: tuple[str | None, ...] = ()
    ) -> Any:
        """On the devices; `scale_axes` are those of a quantized matrix's scales."""
        if isinstance(matrix, Quantized):
            values, scales = self._put(matrix.values, axes), self._put(matrix.scales, scale_axes)
            return Quantized(values, scales, matrix.dtype)
        return jax.device_put(matrix, sharding_of(axes, self.placement.mesh))

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

    def _stack(self, weight: Weight, pack: Callable[[np.ndarray], np.ndarray]) -> Matrix:
        """[*weight.stack, ...]: every tensor, arranged, quantized if it is to be, and packed."""
        names = weight.source_names()
        dtype = np.dtype(np.float32) if weight.wide else self.dtype
        quantized = self.quantized and weight.kind in (Kind.LINEAR, Kind.EMBEDDING, Kind.HEAD)

        def packed(name: str) -> Matrix:
            if not quantized:
                return pack(self._arrange(weight, self.read(name).astype(dtype)))
            try:
                matrix = quantize(self._arrange(weight, self.read(name)), self.dtype)
            except NotFinite as error:
                raise CheckpointError(f"{name}: {error}") from error
            return Quantized(pack(matrix.values), matrix.scales, matrix.dtype)

        first = packed(names[0])
        stacked = jax.tree.map(lambda part: np.empty((len(names), *part.shape), part.dtype), first)

        def put(index: int, matrix: Matrix) -> None:
            jax.tree.map(lambda whole, part: np.copyto(whole[index], part), stacked, matrix)

        put(0, first)
        list(self.readers.map(lambda i: put(i, packed(names[i])), range(1, len(names))))
        return jax.tree.map(lambda part: part.reshape(*weight.stack, *part.shape[1:]), stacked)

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
