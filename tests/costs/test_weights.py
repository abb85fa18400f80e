"""Weights of one layer by the axes that cut them, counted by hand; their sum is the model."""

from dataclasses import replace

import pytest

from megajax.config import ModelConfig
from megajax.costs.weights import LayerWeights, layer_weights, parameter_count, table_parameters

LLAMA = ModelConfig(
    num_layers=3, hidden_size=8, num_heads=4, num_kv_heads=2, ffn_hidden_size=10, vocab_size=30, vocab_multiple=4,
    positions="rope", norm="rmsnorm", activation="swiglu", bias=False, tied_head=False,
)  # fmt: skip
MIXTURE = replace(LLAMA, experts=5, experts_per_token=2, expert_ffn_size=6, shared_ffn_size=7, shared_gate=True)
T5 = ModelConfig(
    family="t5", num_layers=3, encoder_layers=2, hidden_size=8, num_heads=2, head_dim=3, ffn_hidden_size=5,
    vocab_size=30, positions="relative", relative_buckets=12, norm="rmsnorm", activation="geglu", bias=False,
)  # fmt: skip


def test_a_dense_layer() -> None:
    """Two norms, queries and output of 4 heads of 2, keys and values of 2; two inputs and one output of 10 units."""
    assert layer_weights(LLAMA) == LayerWeights(2 * 8 + 2 * 8 * 8 + 2 * 8 * 4, 3 * 8 * 10, 0, 0)
    assert table_parameters(LLAMA) == 2 * 32 * 8  # 30 ids in 32 rows
    assert parameter_count(LLAMA, padded=True) == 3 * sum(layer_weights(LLAMA)) + table_parameters(LLAMA) + 8


def test_biases_and_shifts_lie_where_their_matrices_do() -> None:
    shape = replace(LLAMA, norm="layernorm", bias=True, activation="gelu")
    attention = 4 * 8 + 2 * 8 * 8 + 2 * 8 * 4 + (8 + 4 + 4) + 8
    assert layer_weights(shape) == LayerWeights(attention, 2 * 8 * 10 + 10 + 8, 0, 0)


def test_a_layer_of_a_mixture() -> None:
    """Five experts of 6 units, a shared MLP of 7; router and gate of the shared MLP are whole on every device."""
    experts, shared, whole = 5 * 3 * 8 * 6, 3 * 8 * 7, 8 * 5 + 8
    assert layer_weights(MIXTURE) == LayerWeights(layer_weights(LLAMA).attention, shared, experts, whole)
    assert layer_weights(MIXTURE).on_device(tensor=2, expert=5, whole_heads=True) == (
        layer_weights(LLAMA).attention + shared / 2 + experts / 10 + whole
    )


def test_layers_of_t5() -> None:
    """Attention is four matrices of 2 heads of 3; a decoder's layer has as many again for the encoder, and a norm."""
    encoder, decoder = layer_weights(T5), layer_weights(T5, crossed=True)
    assert encoder == LayerWeights(2 * 8 + 4 * 8 * 6, 3 * 8 * 5, 0, 0)
    assert decoder == encoder._replace(attention=3 * 8 + 8 * 8 * 6)
    biases, last_norms = 2 * 12 * 2, 2 * 8
    assert parameter_count(T5) == 2 * sum(encoder) + 3 * sum(decoder) + 30 * 8 + biases + last_norms


@pytest.mark.parametrize("shape", [LLAMA, MIXTURE, T5])
def test_models_that_differ_in_the_vocabulary_alone(shape: ModelConfig) -> None:
    larger = replace(shape, vocab_size=shape.vocab_size + 10)
    assert parameter_count(larger) - parameter_count(shape) == 10 * 8 * (1 if shape.tied_head else 2)
