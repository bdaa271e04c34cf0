"""The operations of the engine. Each platform fills this one interface; `reference` is the oracle.

Everything here runs inside a jitted program, on one device's shard of the model. Batches are
padded to a program's shape; the live counts are run-time scalars, and kernels skip what lies
beyond them: padding rows of an output hold anything, unless it says otherwise.

KV pools are [layers, blocks, block_size, kv_heads, head_dim]: the KV of one token lies in one
piece, so that a block, a chunk of tokens and a range of heads each copy as whole rows, a
quantized pool adds its scales as [layers, blocks, block_size, kv_heads], and tensor
parallelism shards the heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np

from engine.kernels.activation import Activation
from engine.kernels.batch import Batch
from engine.sampling import RowParams, Sampled, Scores, SlotBiases


class UnsupportedShape(ValueError):
    """The chosen kernels do not compute this shape; the message names it and the limit."""


class KVPools(NamedTuple):
    """[layers, blocks, block_size, kv_heads, head_dim] each, as the kernels store them."""

    k: Any
    v: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Linear:
    """The weight of a matmul, in the layout that one platform's kernels want.

    Attributes:
        matrix: what `Kernels.pack_linear` made, one matrix per layer in front if layered; an
            array, or of a quantized weight an engine.kernels.quantized.Quantized.
        bias: [layers, features], or None.
        features: outputs on one shard.
    """

    matrix: Any
    bias: Any
    features: int = field(metadata={"static": True})


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes. A query at position p sees position t <= p if

    Attributes:
        scale: multiplies the scores.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None leaves them.
        window: only t > p - window (sliding window); None is no limit.
        chunk: only t of the same chunk, t // chunk == p // chunk; None is no limit.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How the experts of a token are chosen and weighed by their scores, one per expert.

    Attributes:
        top_k: experts of a token: those of the highest scores, of equal ones the lower ids.
        gate: what makes a weight of a score: "softmax" over all experts, or "sigmoid" of it alone.
        normalized: a token's weights are divided by their sum. With softmax that is the same as
            a softmax over the chosen experts only.
    """

    top_k: int
    gate: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True


class Routing(NamedTuple):
    """The experts of each token: int32 [T, top_k] ids and their float32 [T, top_k] weights."""

    experts: Any
    weights: Any


class Kernels(Protocol):
    """One platform's implementation, chosen once at start. Stateless."""

    @property
    def name(self) -> str:
        """What the start-up log calls it."""

    def check(
        self, dtype: np.dtype, *, heads: int, kv_heads: int, head_dim: int, hidden: int, ffn: int
    ) -> None:
        """Refuse what cannot be computed in `dtype`; sizes are those of one shard.

        Raises:
            UnsupportedShape: names the size and the limit.
        """

    def pool_dtype(self, dtype: Any) -> np.dtype:
        """The dtype that a pool of `dtype` is stored in (of the same width).

        Raises:
            UnsupportedShape: there are no pools of `dtype`.
        """

    def settle(self, array: Any) -> None:
        """Called once for each weight and pool, when it is where it will stay."""

    def pack_linear(self, weight: np.ndarray, shards: int) -> np.ndarray:
        """A matrix [out, in], as checkpoints have it, in the layout that `linear` wants.

        Runs at load, on the host. `shards` is in how many equal parts the outputs will be
        cut: each part is packed by itself. int8 are the values of a quantized weight, for
        activations of any dtype.
        """

    def packed_axes(self, out_axis: str | None, in_axis: str | None) -> tuple[str | None, ...]:
        """Logical axes of `pack_linear`'s result, for the sharding table."""

    def pack_head(self, weight: np.ndarray, shards: int) -> np.ndarray:
        """The output projection [vocab, hidden], in the layout that `logits` and `embed` want."""

    def head_axes(self) -> tuple[str | None, ...]:
        """Logical axes of `pack_head`'s result."""

    def embed(self, head: Linear, tokens: Any) -> Any:
        """[T, hidden]: rows `tokens` [T] of a packed head, in the dtype of the activations."""

    def rms_norm(self, x: Any, weight: Any, layer: Any, live: Any, eps: float) -> Any:
        """Root mean square norm of x [T, hidden] in float32, times weight [layers, hidden].

        The weight is float32 or of the dtype of x: Gemma's 1 + w would not fit into bfloat16.
        """

    def head_norm(self, x: Any, weight: Any, layer: Any, live: Any, eps: float) -> Any:
        """`rms_norm` of each head of x [T, heads, head_dim] by itself.

        One weight [layers, head_dim] for all heads, or None: times nothing.
        """

    def linear(
        self,
        x: Any,
        weights: tuple[Linear, ...],
        layer: Any,
        live: Any,
        residual: Any = None,
        wide: bool = False,
    ) -> tuple[Any, ...]:
        """x [T, in] times each weight, plus its bias: [T, features] each, in x.dtype.

        Sums are float32; `wide` leaves the results so. `residual` [T, features] is added to
        the one result. A quantized weight's scales multiply the sums, before the bias.
        """

    def gated_linear(
        self,
        x: Any,
        gate: Linear,
        up: Linear,
        layer: Any,
        live: Any,
        activation: Activation = "silu",
    ) -> Any:
        """activation(x gate) * (x up): [T, features] in x.dtype; the product is of float32."""

    def route(self, x: Any, router: Linear, layer: Any, live: Any, spec: RoutingSpec) -> Routing:
        """The experts of each row of x [T, hidden], whose scores are x times `router`, in float32.

        The features of `router` are the experts, all of them on every shard.
        """

    def experts(
        self,
        x: Any,
        routing: Routing,
        gate: Linear,
        up: Linear,
        down: Linear,
        layer: Any,
        live: Any,
        activation: Activation = "silu",
        weigh_inputs: bool = False,
    ) -> Any:
        """The gated MLPs of each token's experts, weighed and summed: float32 [T, hidden].

        Costs as much as the routed rows do; a weight to which no live row is routed is not read.
        A token's experts are added up in the order of their ids.

        Every shard holds an equal slice of every expert's MLP, as of a dense one, so that shards
        have equal work whichever experts are chosen. Their results are parts of a sum, in
        float32 because it is to be rounded once.

        Args:
            x: [T, hidden].
            gate, up, down: matrices [layers, experts, ...], each as `pack_linear` made it of
                [ffn, hidden], [ffn, hidden] and [hidden, ffn]; scales of quantized ones and biases
                are [layers, experts, features].
            weigh_inputs: the weights multiply the experts' inputs, rounded to x.dtype, and not
                their outputs (Llama 4).
        """

    def logits(self, hidden: Any, head: Linear, live: Any, soft_cap: float | None = None) -> Any:
        """float32 [S, features] from hidden [S, hidden].

        With a soft cap: soft_cap * tanh(logit / soft_cap).
        """

    def rotate(self, q: Any, k: Any, angles: Any, positions: Any, live: Any) -> tuple[Any, Any]:
        """Rotary embedding of q [T, heads, head_dim] and k [T, kv_heads, head_dim].

        angles is float32 [positions, width]: cosines of the width / 2 angles, then their sines.
        Pairs are (i, i + width / 2), Hugging Face's order; what a head has beyond `width` passes
        as it is. A model whose pairs are (2 i, 2 i + 1) is loaded with the outputs of its q and k
        reordered, which leaves every score as it was; layers of other angles bring another table.
        """

    def write_kv(
        self, pools: KVPools, layer: Any, slots: Any, k: Any, v: Any, live: Any
    ) -> KVPools:
        """Put k and v [T, kv_heads, head_dim] at `slots` [T] of one layer, in place.

        A slot is block * block_size + offset; those outside the pool are dropped.
        """

    def attention(
        self, q: Any, pools: KVPools, layer: Any, batch: Batch, spec: AttentionSpec
    ) -> Any:
        """Causal attention of a ragged batch over its blocks, in one layer.

        Args:
            q: [T, heads, head_dim]; heads is a multiple of kv_heads.
            pools: hold the KV of this step's tokens already.

        Returns:
            [T, heads, head_dim] in q.dtype.
        """

    def export_kv(
        self, pool: Any, slots: Any, live: Any, layers: tuple[Any, int], heads: tuple[Any, int]
    ) -> Any:
        """[count of layers, n, count of heads, head_dim]: what lies at the first `live` slots [n].

        `layers` and `heads` are (first, count); the count is static, the first a scalar.
        """

    def import_kv(
        self, pool: Any, slots: Any, live: Any, values: Any, first_layer: Any, first_head: Any
    ) -> Any:
        """The inverse of `export_kv`, in place."""

    def sample(
        self, logits: Any, params: RowParams, counts: Any, biases: SlotBiases, num_rows: Any
    ) -> tuple[Sampled, Any]:
        """Choose the next token of each row; see engine.sampling.sample. No two have one slot."""

    def score(self, logits: Any, tokens: Any, num_rows: Any) -> Scores:
        """Log-probabilities of given tokens; see engine.sampling.score."""

    def copy_blocks(self, pool: Any, sources: Any, targets: Any, live: Any) -> Any:
        """Copy the first `live` blocks `sources` [n] to `targets` [n] in all layers, in place.

        No block is a source and a target at once.
        """
