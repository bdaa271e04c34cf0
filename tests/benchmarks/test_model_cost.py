"""What a model must read and compute, against sums by hand."""

import pytest

from benchmarks.model_cost import cost_of

CONFIG = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SHAPES = {
    "model.embed_tokens.weight": (100, 16),
    "model.layers.0.self_attn.q_proj.weight": (32, 16),
    "model.layers.0.self_attn.k_proj.weight": (16, 16),
    "model.layers.0.self_attn.v_proj.weight": (16, 16),
    "model.layers.0.input_layernorm.weight": (16,),
}


def test_a_step_reads_every_matrix_and_the_context_once() -> None:
    cost = cost_of(CONFIG, SHAPES)
    assert cost.matmuls == {(16, 32): 1, (16, 16): 2}
    weights = 100 * 16 + 32 * 16 + 2 * 16 * 16
    kv = 2 * 16 * 10  # K and V of 10 tokens, 2 heads of 8
    assert cost.decode_bytes(10) == 2 * (weights + kv)


def test_a_prompt_computes_layers_attention_and_one_row_of_the_head() -> None:
    cost = cost_of(CONFIG, SHAPES)
    layers = 2 * 10 * (32 * 16 + 2 * 16 * 16)
    attention = 4 * 32 * 10 * 5
    assert cost.prompt_flops(10) == layers + attention + 2 * 100 * 16


def test_an_output_matrix_of_its_own_takes_the_embeddings_place() -> None:
    tied = cost_of(CONFIG, SHAPES)
    untied = cost_of(CONFIG, SHAPES | {"lm_head.weight": (120, 16)})
    assert untied.head == (16, 120)
    assert untied.matmuls == tied.matmuls
    assert untied.decode_bytes(0) - tied.decode_bytes(0) == 2 * 20 * 16


@pytest.mark.parametrize(("missing", "kv", "query"), [("head_dim", 8, 16), ("none", 16, 32)])
def test_head_widths_may_follow_from_others(missing: str, kv: int, query: int) -> None:
    config = {key: value for key, value in CONFIG.items() if key != missing}
    cost = cost_of(config, SHAPES)
    assert (cost.kv_width, cost.query_width) == (kv, query)
