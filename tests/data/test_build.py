from pathlib import Path

import numpy as np
import pytest

from megajax.config import DataConfig, InputError
from megajax.data.build import build_datasets
from megajax.data.gpt import GPTDataset
from megajax.data.loader import Loader
from megajax.data.samples import Recipe
from megajax.data.tokenizers import NullTokenizer
from megajax.data.tokenizers.fast import bert_wordpiece

TOKENIZER = NullTokenizer(999)
SIZES = {"train": 12, "valid": 4, "test": 4}


@pytest.fixture
def prefix(write_documents, tmp_path: Path) -> str:
    """100 documents of 5 tokens, each its own number."""
    write_documents([[i] * 5 for i in range(100)])
    return str(tmp_path / "corpus")


def build(sizes=SIZES, **settings):
    return build_datasets(Recipe(DataConfig(seq_length=4, **settings), TOKENIZER), sizes, seed=1)


def documents_of(dataset) -> set[int]:
    batch = dataset.batch(np.arange(len(dataset)))
    return {*batch["tokens"].ravel().tolist(), *batch["labels"].ravel().tolist()}


def test_one_path_is_cut_by_split(prefix: str):
    datasets = build(path=(prefix,), split="90,6,4", sizes={"train": None, "valid": None, "test": None})

    assert documents_of(datasets["train"]) <= set(range(90))
    assert documents_of(datasets["valid"]) <= set(range(90, 96))
    assert documents_of(datasets["test"]) <= set(range(96, 100))
    assert len(datasets["train"]) == (90 * 5 - 1) // 4
    assert all(isinstance(dataset, GPTDataset) for dataset in datasets.values())


def test_all_documents_train(prefix: str, caplog):
    """Validation and test are absent, without a warning; so is a split of which no samples are wanted."""
    datasets = build(path=(prefix,), split="100,0,0", sizes={"train": None, "valid": 4, "test": 4})
    assert len(datasets["train"]) == (100 * 5 - 1) // 4
    assert datasets["valid"] is None
    assert datasets["test"] is None
    assert caplog.messages == []

    assert build(path=(prefix,), sizes={"train": 12, "valid": 0})["valid"] is None


def test_split_rounded_to_nothing_is_warned_about(write_documents, tmp_path: Path, caplog):
    write_documents([[i] * 5 for i in range(10)])
    datasets = build(path=(str(tmp_path / "corpus"),), split="949,50,1")

    assert datasets["test"] is None
    assert caplog.messages == [f"{tmp_path / 'corpus'}: its 10 documents leave none for the test split"]
    assert documents_of(datasets["valid"]) == {9}


def test_a_path_per_split(write_documents, tmp_path: Path):
    paths = {}
    for k, name in enumerate(("train", "valid")):
        write_documents([[k] * 50], name)
        paths[f"{name}_path"] = (str(tmp_path / name),)
    datasets = build(**paths)

    assert documents_of(datasets["train"]) == {0}
    assert documents_of(datasets["valid"]) == {1}
    assert datasets["test"] is None


def test_weighted_blend_builds_a_surplus_of_each_source(write_documents, tmp_path: Path):
    for k in range(2):
        write_documents([[k] * 2001], f"source{k}")
    path = ("3", str(tmp_path / "source0"), "7", str(tmp_path / "source1"))
    blend = build(path=path, split="1", sizes={"train": 1000})["train"]

    assert len(blend) == 1000
    assert [source.orders for source in blend.mix.sources] == [(302,), (704,)]
    assert [source.consumed for source in blend.at(1000).sources] == [300, 700]
    # 500 samples of 4 tokens an epoch
    assert blend.table(0) == [
        "share      read  epochs  by the end  epochs",
        f"30.0%         0    0.00         300    0.60  {tmp_path / 'source0'}",
        f"70.0%         0    0.00         700    1.40  {tmp_path / 'source1'}",
    ]
    assert blend.batch(np.array([0]))["tokens"].tolist() == [[1] * 4]


def test_single_prefix(prefix: str):
    """Megatron builds a surplus for a weighted one, but only on a common path."""
    assert build(path=(prefix,))["train"].mix.sources[0].orders == (12,)
    assert build(path=("1.0", prefix))["train"].mix.sources[0].orders == (13,)
    assert build(train_path=("1.0", prefix))["train"].mix.sources[0].orders == (12,)


def test_unweighted_list_uses_every_source_once(write_documents, tmp_path: Path):
    for k, tokens in enumerate((21, 13, 5)):
        write_documents([[k] * tokens], f"source{k}")
    path = tuple(str(tmp_path / f"source{k}") for k in range(3))

    whole = build(path=path, split="1", sizes={"train": None})["train"]
    assert whole.dataset_index.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 0]
    assert len(build(path=path, split="1", sizes={"train": 100})["train"]) == 9
    assert len(build(path=path, split="1", sizes={"train": 4})["train"]) == 4


def test_source_without_documents_in_a_split_is_left_out(write_documents, prefix: str, tmp_path: Path, caplog):
    write_documents([[999] * 5], "small")
    path = ("1", prefix, "1", str(tmp_path / "small"))
    valid = build(path=path, split="90,10", sizes={"valid": 4})["valid"]

    assert caplog.messages == [f"{tmp_path / 'small'}: its 1 documents leave none for the valid split"]
    assert documents_of(valid) <= set(range(90, 100))


def test_weighted_blend_without_a_size_ends_with_its_first_source(prefix: str):
    """Held-out samples of a weighted blend: in proportion, none twice, every one readable."""
    sources = ("1", prefix, "3", prefix)
    one = build(path=(prefix,), sizes={"valid": None})["valid"]
    valid = build(path=sources, sizes={"valid": None})["valid"]
    assert len(valid) == (len(one) - 1) * 4 // 3
    assert valid.batch(np.arange(len(valid)))["loss_mask"].all()


def test_held_out_splits_too_short_for_a_sample_are_left_out(write_documents, tmp_path: Path, caplog):
    """They do not stop a training run that never asked for them."""
    write_documents([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]] * 9 + [[1]])
    built = build(path=(str(tmp_path / "corpus"),), split="90,10,0", sizes={"train": 2, "valid": None})
    assert built["valid"] is None
    assert "the 1 tokens of its valid split make no sample" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"set either data\.path, or data\.train_path"),
        ({"path": ("a",), "valid_path": ("b",)}, r"data\.valid_path is \[b\] without data\.train_path"),
        ({"path": ("a",), "train_path": ("b",)}, r"data\.path and data\.train_path are both set"),
    ],
)
def test_sources_are_given_one_way(settings: dict, message: str):
    with pytest.raises(InputError, match=message):
        build(**settings)


def test_cache_lies_beside_the_source_or_where_told(prefix: str, tmp_path: Path):
    build(path=(prefix,), sizes={"train": 12})
    assert len(list((tmp_path / "cache").iterdir())) == 3

    build(path=(prefix,), sizes={"train": 12}, cache_dir=str(tmp_path / "elsewhere"))
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_sources_that_are_used_up_go_on_with_weights(write_documents, tmp_path: Path, order: str) -> None:
    """Two whole sources of 12 samples each, all read: another order has nothing more, weights read them again."""
    for name in "ab":
        write_documents([[ord(name)] * 5] * 10, name)
    first = build(path=(str(tmp_path / "a"), str(tmp_path / "b")), split="1", sizes={"train": 24})["train"]
    assert len(first) == 24
    paths = tuple(str(tmp_path / name) for name in order)

    def resumed(path):
        recipe = Recipe(DataConfig(seq_length=4, path=path, split="1"), TOKENIZER)
        return build_datasets(recipe, {"train": 30}, 1, first.at(24), 24)["train"]

    again = resumed(paths)
    assert len(again) == 24
    assert again.at(24).sources[0].consumed == 12
    with pytest.raises(InputError, match=r"each read once, have 24: name more of them, .* or give each a weight"):
        Loader(again, 0, lambda _: 6, 1, 24)
    weighted = tuple(word for path in paths for word in ("1", path))
    more = resumed(weighted)
    assert len(more) >= 30
    assert set(more.batch(np.arange(24, 30))["tokens"].ravel().tolist()) == {ord("a"), ord("b")}


@pytest.mark.parametrize(
    ("kind", "last", "reason"),
    [
        ("bert", [[5]], "the valid split needs documents with at least 2 sentences; found 0 of 1"),
        ("instruction", [[5] * 40, [6]], "the valid split has 1 conversations but no answer within"),
    ],
)
def test_a_split_without_a_usable_document_is_left_out(
    write_sentences, tmp_path: Path, caplog, kind: str, last: list[list[int]], reason: str
) -> None:
    """With gpt samples it was, with others it ended the run; what is to be trained on still has to be usable."""
    write_sentences([[[5, 6], [7, 8]]] * 9 + [last])
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = bert_wordpiece(tmp_path / "vocab.txt", lower_case=True)
    paths = {"seq_length": 16, "path": (str(tmp_path / "sentences"),)}

    def build(**settings):
        recipe = Recipe(DataConfig(**settings), tokenizer, kind, pair_task=True)
        return build_datasets(recipe, {"train": 4, "valid": None}, seed=1)

    datasets = build(**paths, split="9,1,0")
    assert len(datasets["train"]) >= 4
    assert datasets["valid"] is None
    assert [message for message in caplog.messages if reason in message and message.endswith(": left out")]
    write_sentences([last], "last")
    with pytest.raises(InputError, match=reason.replace("valid", "train")):
        build(**paths | {"train_path": (str(tmp_path / "last"),), "path": ()})
