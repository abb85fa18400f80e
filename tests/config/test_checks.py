"""Values that are valid alone and wrong together are refused."""

from dataclasses import replace

import pytest

from megajax.config import (
    CheckpointConfig,
    Config,
    HealthConfig,
    InputError,
    ModelConfig,
    ParallelConfig,
    TokenizerConfig,
    check_batch,
    check_config,
    check_training,
    resolve_mesh,
)
from megajax.config.load import load_config
from megajax.config.parallel import fit_vocabulary


def refusal(*words: str) -> str:
    with pytest.raises(InputError) as caught:
        check_config(load_config(None, words).config)
    return str(caught.value)


def accept(*words: str) -> None:
    check_config(load_config(None, words).config)


def test_defaults_pass():
    check_config(Config())


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: ModelConfig(num_heads=32, hidden_size=64, num_kv_heads=5), "model.num_heads 32 is not a multiple of"),
        (lambda: replace(ModelConfig(), rope_base=500.0), "model.rope_base is for model.positions rope, not learned"),
        (lambda: Config(train={"micro_batch_size": 16}), "train.micro_batch_size is 16: use 1 to 8"),
        (lambda: CheckpointConfig(local="/scratch"), "checkpoint.local and checkpoint.local_every belong together"),
        (lambda: HealthConfig(spike_factor=0.5), "health.spike_factor is 0.5: a spike is above 1 x the mean"),
        (lambda: TokenizerConfig(type="tiktoken"), "tokenizer.type tiktoken needs a file: set tokenizer.model"),
    ],
)
def test_a_component_refuses_by_itself_what_does_not_fit(build, expected):
    """In a notebook as well, by one line, before anything is made of it."""
    with pytest.raises(InputError) as caught:
        build()
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_values_of_wrong_types_come_before_values_that_do_not_fit():
    assert refusal("train.micro_batch_size=16", "optim.lr=fast") == "`optim.lr` is fast (command line): expected float"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "num_heads=32 hidden_size=64 num_kv_heads=5",
            "num_heads 32 is not a multiple of model.num_kv_heads 5 (32 % 5 = 2)",
        ),
        ("num_heads=32 hidden_size=64 num_kv_heads=0", "model.num_kv_heads is 0"),
        ("num_heads=32 hidden_size=64 num_kv_heads=-1", "model.num_kv_heads is -1"),
        (
            "num_heads=33 hidden_size=66 num_kv_heads=2",
            "num_heads 33 is not a multiple of model.num_kv_heads 2 (33 % 2 = 1)",
        ),
        ("num_heads=8 hidden_size=100", "hidden_size 100 is not a multiple of model.num_heads 8 (100 % 8 = 4)"),
    ],
)
def test_heads_come_in_whole_groups(words, expected):
    assert expected in refusal(*(f"model.{word}" for word in words.split()))


def test_a_head_dim_of_its_own_frees_the_width():
    accept("model.num_heads=8", "model.hidden_size=100", "model.head_dim=16")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "model.num_heads=8 model.num_kv_heads=2 parallel.tensor=4",
            "model.num_kv_heads 2 is not a multiple of parallel.tensor 4",
        ),
        (
            "model.num_heads=8 model.num_kv_heads=2 parallel.tensor=8",
            "never copied: choose a parallel.tensor that divides them",
        ),
        (
            "model.num_heads=6 model.num_kv_heads=3 parallel.tensor=2",
            "model.num_kv_heads 3 is not a multiple of parallel.tensor 2",
        ),
        (
            "model.num_heads=12 parallel.tensor=8",
            "model.num_heads 12 is not a multiple of parallel.tensor 8 (12 % 8 = 4)",
        ),
        (
            "model.experts=4 model.bias=false model.dense_layers=1 model.expert_ffn_size=32 model.hidden_size=12 "
            "model.num_heads=2 model.activation=swiglu",
            "model.ffn_hidden_size comes out as 0 for hidden_size 12: set it",
        ),
        (
            "model.ffn_hidden_size=3070 parallel.tensor=4",
            "model.ffn_hidden_size 3070 is not a multiple of parallel.tensor 4",
        ),
        (
            "parallel.fsdp=5 train.global_batch_size=5",
            "model.hidden_size 768 is not a multiple of parallel.fsdp 5 (768 % 5 = 3)",
        ),
        (
            "model.num_layers=80 parallel.pipe=16 parallel.chunks=2",
            "model.num_layers 80 is not a multiple of parallel.pipe 16 x parallel.chunks 2 = 32 (80 % 32 = 16): "
            "use 64 or 96 layers",
        ),
        (
            "model.num_layers=40 parallel.pipe=8 parallel.chunks=2",
            "40 % 16 = 8",
        ),
        ("parallel.chunks=2", "parallel.chunks=2 interleaves pipeline stages: set parallel.pipe, or leave it at 1"),
        (
            "parallel.pipe=4 parallel.chunks=3 train.global_batch_size=6 parallel.data=1",
            "microbatches (train.global_batch_size / 1) 6 is not a multiple of parallel.pipe 4 (6 % 4 = 2)",
        ),
        ("parallel.expert=2", "parallel.expert=2 shards experts: set model.experts, or leave it at 1"),
        (
            "parallel.context=4 data.seq_length=1020",
            "data.seq_length 1020 is not a multiple of 2 x context 4 = 8 (1020 % 8 = 4)",
        ),
    ],
)
def test_shards_are_whole(words, expected):
    assert expected in refusal(*words.split())


def test_vocabularies_are_padded_to_fit_every_layout():
    """MT-NLG's 35 stages x 8: 50,257 ids in 53,760 rows, a multiple of 128 and of 280."""
    model = ModelConfig(vocab_size=50257)
    assert fit_vocabulary(model, ParallelConfig(pipe=35, tensor=8)).padded_vocab_size == 53_760
    assert fit_vocabulary(model, ParallelConfig(tensor=8)).padded_vocab_size == 50_304


@pytest.mark.parametrize("positions", ["learned", "rope", "none"])
def test_sequences_stay_within_the_positions(positions):
    message = refusal("data.seq_length=2048", f"model.positions={positions}")
    assert "data.seq_length 2048 exceeds model.max_positions 1024" in message


def test_sequence_parallelism_cuts_the_sequence():
    message = refusal("data.seq_length=1022", "parallel.tensor=4")
    assert "data.seq_length 1022 is not a multiple of context 1 x tensor 4 = 4 (1022 % 4 = 2)" in message
    accept("data.seq_length=1022", "parallel.tensor=4", "parallel.sequence_parallel=false")


def test_a_scale_of_tokens_is_none_of_positions():
    message = refusal("model.embedding_scale=true", "model.positions=learned")
    assert message.startswith("model.embedding_scale scales tokens alone, but rows of model.positions learned")
    accept("model.embedding_scale=true", "model.positions=rope")


def test_rotary_embedding_turns_pairs_of_dims():
    words = ["model.positions=rope", "model.hidden_size=24", "model.num_heads=2"]
    message = refusal(*words, "model.rope_fraction=0.25")
    assert message.startswith("model.rope_fraction 0.25 rotates 3 of the 12 dims of a head, which turn in pairs")
    accept(*words, "model.rope_fraction=0.5")


def test_stages_hold_whole_patterns():
    words = ["model.num_layers=12", "model.window=8", "model.layer_pattern=[local,local,global]"]
    message = refusal(*words, "parallel.pipe=3", "parallel.chunks=2")
    assert "model.layer_pattern has 3 layers, and a stage of parallel.pipe 3 x parallel.chunks 2 has 2" in message
    accept(*words, "parallel.pipe=2", "parallel.chunks=2")
    accept(*words[1:], "model.num_layers=13", "parallel.pipe=1")
    message = refusal("model.window=8", "model.layer_pattern=[local,local]")
    assert message == "model.layer_pattern has local layers only: leave it empty, and model.window set"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "global_batch_size=10 micro_batch_size=4",
            "10 is not a multiple of train.micro_batch_size 4 x data 1 x fsdp 1 = 4 (10 % 4 = 2)",
        ),
        ("global_batch_size=8 micro_batch_size=16", "train.micro_batch_size is 16: use 1 to 8"),
        ("global_batch_size=8 micro_batch_size=0", "train.micro_batch_size is 0: use 1 to 8"),
        ("global_batch_size=8 rampup=[2,4,100] samples=1000", "8 - 2 = 6 is not a multiple of the increment 4"),
        (
            "global_batch_size=8 rampup=[16,4,100] samples=1000",
            "train.rampup starts at 16, above train.global_batch_size 8",
        ),
        ("global_batch_size=8 rampup=[4,4,100] steps=1000", "train.rampup needs a run counted in samples"),
        (
            "global_batch_size=8 rampup=[2,2,9] samples=99 micro_batch_size=4",
            "train.rampup start 2 is not a multiple of",
        ),
        ("steps=3 samples=8", "train.steps 3 and train.samples 8 are both set"),
        ("remat=[qkv,atention_out]", "no activation is called atention_out: did you mean attention_out?"),
        ("remat=[zzz]", "no activation is called zzz: the names are block_input, attention_residual, qkv"),
    ],
)
def test_batches_and_lengths(words, expected):
    assert expected in refusal(*(f"train.{word}" for word in words.split()))


def test_three_replicas_do_not_share_eight_samples_in_pairs():
    words = ["train.global_batch_size=8", "train.micro_batch_size=2"]
    expected = "8 is not a multiple of train.micro_batch_size 2 x data 3 x fsdp 1 = 6 (8 % 6 = 2): use 6 or 12"
    config = load_config(None, words).config
    with pytest.raises(InputError) as caught:
        check_batch(config.train, config.parallel, data_size=3)
    assert expected in str(caught.value)
    assert expected in refusal(*words, "parallel.data=3")
    check_batch(config.train, config.parallel, data_size=4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("optim.lr=1e-4 optim.min_lr=1e-3", "optim.min_lr 0.001 is above optim.lr 0.0001"),
        ("optim.warmup_steps=3 optim.warmup_fraction=0.1", "optim.warmup_steps and optim.warmup_fraction are both set"),
        (
            "train.samples=100 optim.warmup_steps=3",
            "optim.warmup_steps does not go with train.samples: use optim.warmup_samples",
        ),
        (
            "train.steps=100 optim.decay_samples=3",
            "optim.decay_samples does not go with train.steps: use optim.decay_steps",
        ),
        ("train.steps=10 optim.warmup_steps=11", "optim.warmup_steps 11 is more than the 10 steps"),
        (
            "train.samples=90 optim.decay_samples=80 optim.warmup_samples=81",
            "optim.warmup_samples 81 is more than the 80 samples",
        ),
        ("train.steps=9 optim.decay_style=wsd", "set optim.wsd_steps or wsd_samples"),
        (
            "train.steps=9 optim.decay_style=wsd optim.wsd_steps=5 optim.warmup_steps=5",
            "optim.warmup_steps 5 + optim.wsd_steps 5 is more than the 9",
        ),
        ("train.steps=9 optim.wsd_steps=5", "optim.wsd_steps is for optim.decay_style wsd, not linear"),
    ],
)
def test_schedules_fit_the_run(words, expected):
    assert expected in refusal(*words.split())


def test_warmup_may_take_the_whole_run():
    accept("train.steps=10", "optim.warmup_steps=10")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("data.path=a data.text=b.jsonl", "data.path and data.text are both set"),
        ("data.path=a data.train_path=b", "data.path and data.train_path are both set"),
        ("data.valid_path=a", "data.valid_path is [a] without data.train_path, to which it belongs"),
        ("tokenizer.type=sentencepiece", "tokenizer.type sentencepiece needs a file: set tokenizer.model"),
        ("tokenizer.type=huggingface", "tokenizer.type huggingface needs a file: set tokenizer.model"),
        ("tokenizer.type=gpt2_bpe tokenizer.vocab=vocab.json", "needs a file: set tokenizer.merges"),
    ],
)
def test_sources_and_tokenizers(words, expected):
    assert expected in refusal(*words.split())


def test_a_sentencepiece_model_can_be_trained_instead_of_given():
    accept("tokenizer.type=sentencepiece", "tokenizer.vocab_size=512")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "how long to train is not set"),
        ("train.steps=3", "no training data"),
        ("train.steps=3 data.path=a", "tokenizer.type null needs tokenizer.vocab_size"),
        ("train.steps=3 data.text=a.jsonl model.vocab_size=9", "tokenizer.type null needs tokenizer.vocab_size"),
    ],
)
def test_training_needs_a_length_data_and_a_vocabulary(words, expected):
    with pytest.raises(InputError, match=expected):
        check_training(load_config(None, words.split()).config)


def test_enough_to_train():
    check_training(load_config(None, ["train.steps=3", "data.path=a", "model.vocab_size=9"]).config)
    check_training(load_config(None, ["train.samples=3", "data.text=a.jsonl", "tokenizer.vocab_size=9"]).config)


def test_auto_data_takes_the_devices_that_are_left():
    sizes = resolve_mesh(ParallelConfig(fsdp=2, tensor=4), num_devices=32)
    assert list(sizes.items()) == [("pipe", 1), ("data", 4), ("fsdp", 2), ("expert", 1), ("context", 1), ("tensor", 4)]


def test_meshes_that_do_not_take_all_devices_show_the_arithmetic():
    with pytest.raises(InputError) as caught:
        resolve_mesh(ParallelConfig(tensor=3), num_devices=8)
    assert (
        "the number of devices 8 is not a multiple of pipe 1 x fsdp 1 x expert 1 x context 1 x tensor 3 = 3 (8 % 3 = 2)"
        in str(caught.value)
    )
    with pytest.raises(InputError) as caught:
        resolve_mesh(ParallelConfig(data=2, tensor=2), num_devices=8)
    assert "pipe 1 x data 2 x fsdp 1 x expert 1 x context 1 x tensor 2 = 4 devices, but there are 8" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("words", "works"),
    [
        # Qwen2 7B has 28 heads but 4 key/value heads, which have to be divided as well
        (
            "model.num_heads=28 model.hidden_size=3584 model.num_kv_heads=4 parallel.tensor=8",
            "num_heads 28 is not a multiple of parallel.tensor 8 (28 % 8 = 4): choose a parallel.tensor that divides "
            "them, or parallel.whole_heads=true (sizes of parallel.tensor that work: 1, 2, 4)",
        ),
        ("parallel.fsdp=7", "(sizes of parallel.fsdp that work: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, ...)"),
        (
            "model.num_layers=80 parallel.pipe=16 parallel.chunks=2",
            "(products that work: 1, 2, 4, 5, 8, 10, 16, 20, 40, 80)",
        ),
        (
            "data.seq_length=1020 parallel.context=4",
            "(products that work: 2, 4, 6, 10, 12, 20, 30, 34, 60, 68, 102, 170, ...)",
        ),
    ],
)
def test_what_does_not_divide_says_what_would(words: str, works: str) -> None:
    assert works in refusal(*words.split())
