"""Switches that a model family lacks, and layouts that T5 lacks, are refused."""

import pytest

from megajax.config import InputError, check_config
from megajax.config.load import load_config

T5 = (
    "model.family=t5", "model.positions=relative", "model.bias=false", "model.norm=rmsnorm", "data.seq_length=64",
    "data.decoder_seq_length=12",
)  # fmt: skip
FAMILIES = {"gpt": (), "bert": ("model.family=bert",), "t5": T5}


def check(family, words):
    check_config(load_config(None, [*FAMILIES[family], *words.split()]).config)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt", "model.positions=alibi model.embedding_norm=true model.window=64"),
        ("bert", "model.norm_placement=post model.token_types=2 model.pair_task=true model.position_offset=2"),
        ("bert", "parallel.pipe=2 parallel.context=2"),
        ("t5", "model.encoder_layers=6 parallel.tensor=4 parallel.fsdp=2 train.global_batch_size=2"),
        ("t5", "parallel.tensor=2 data.decoder_seq_length=13 parallel.sequence_parallel=false"),
    ],
)
def test_families_have_their_switches(family, words):
    check(family, words)


@pytest.mark.parametrize(
    ("family", "words", "expected"),
    [
        ("gpt", "model.token_types=2", "model.token_types is for model.family bert, not gpt"),
        ("gpt", "model.encoder_layers=2", "model.encoder_layers is for model.family t5, not gpt"),
        ("gpt", "model.positions=relative", "use learned or rope or alibi or none"),
        ("gpt", "model.norm_placement=post", "model.norm_placement is for model.family bert, not gpt"),
        ("bert", "model.positions=rope", "positions rope does not go with model.family bert: use learned"),
        ("bert", "model.window=8", "model.window is for model.family gpt, not bert"),
        ("bert", "model.tied_head=false", "the head of bert is its embedding"),
        ("t5", "model.positions=learned", "positions learned does not go with model.family t5: use relative"),
        ("t5", "model.num_kv_heads=4", "t5 has one per head"),
        ("t5", "model.bias=true", "t5 has no biases"),
        ("t5", "model.embedding_norm=true", "model.embedding_norm: t5 has none"),
        ("t5", "model.relative_buckets=30", "use a multiple of 4"),
        ("t5", "model.relative_max_distance=16", "a distance of more than half of it"),
        ("t5", "parallel.pipe=2", "parallel.pipe=2: the decoder of t5 looks at all of its encoder"),
        ("t5", "parallel.context=2", "parallel.context=2: the decoder of t5"),
        ("t5", "parallel.tensor=2 data.decoder_seq_length=13", "decoder_seq_length 13 is not a multiple of"),
    ],
)
def test_what_a_family_has_not_is_refused(family, words, expected):
    with pytest.raises(InputError) as caught:
        check(family, words)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_number_of_position_rows_goes_with_any_tensor():
    """RoBERTa's 512 positions are 514 rows, which are whole on every shard where they do not divide."""
    words = "model.max_positions=512 data.seq_length=512 model.position_offset=2 model.num_heads=8 model.hidden_size=64"
    for tensor in (1, 2, 4, 8):
        check("bert", f"{words} parallel.tensor={tensor}")
