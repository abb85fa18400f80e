"""The model of a run for generation and evaluation: texts, end tokens and tokenizer, trained here or imported."""

import json
from pathlib import Path

import pytest
import tokenizers

from megajax.config import InputError, TokenizerConfig
from megajax.inference.trained import TrainedModel, load_model
from tests.made_runs import make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """Its SentencePiece tokenizer has a beginning-of-sequence token that no document got."""
    return load_model(make_run(tmp_path_factory.mktemp("trained") / "run", ["the quick brown fox"] * 4, vocab_size=280))


def test_exactly_one_beginning_of_sequence(trained: TrainedModel):
    """None where training had none, one where it is asked for."""
    bos, ids = trained.tokenizer.bos_id, trained.tokenizer.encode("the fox")
    assert bos is not None
    assert trained.encode("the fox") == ids
    assert trained.with_bos(True).encode("the fox") == [bos, *ids]
    assert trained.with_bos(True).with_bos(False).encode("the fox") == ids


def test_no_beginning_of_sequence_to_put(tmp_path: Path):
    with pytest.raises(InputError, match="has no beginning-of-sequence token"):
        load_model(make_run(tmp_path / "run")).with_bos(True)


def imported(directory: Path, **files: object) -> Path:
    """A run as an import leaves it, and moved since: its tokenizer puts tokens round texts."""
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"w{n}": n for n in range(3, 300)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    before = directory / "before"
    before.mkdir()
    tokenizer.save(str(before / "tokenizer.json"))
    files = {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}} | files
    for name, content in files.items():
        (before / name).write_text(json.dumps(content))
    there = TokenizerConfig(type="huggingface", model=str(before / "tokenizer.json"))
    run = make_run(directory / "run", tokenizer=there)
    before.rename(run / "huggingface")
    return run


def test_imported_models(tmp_path: Path):
    """End tokens are a list, and texts begin with one token, also if a template spells it out."""
    there = load_model(imported(tmp_path, **{"generation_config.json": {"eos_token_id": [7, 1, 11]}}))
    assert there.end_ids == (1, 7, 11)
    assert (there.prefix, there.suffix) == ((0,), ())  # a decoder goes on where a prompt ends
    for text in ("w5 w6", "<s>w5 w6", "<s> w5 w6"):
        assert there.encode(text) == [0, 5, 6], text
    assert there.with_bos(False).encode("w5 w6") == [5, 6]


@pytest.mark.parametrize(
    ("content", "ends"), [({"eos_token_id": 9}, (1, 9)), ({}, (1,)), ({"eos_token_id": None}, (1,))]
)
def test_end_tokens_of_config_json(tmp_path: Path, content: dict[str, object], ends: tuple[int, ...]):
    assert load_model(imported(tmp_path, **{"config.json": content})).end_ids == ends


def test_damaged_files_of_an_import(tmp_path: Path):
    run = imported(tmp_path)
    (run / "huggingface" / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json: not JSON"):
        load_model(run)


def test_word_for_another_run(tmp_path: Path):
    with pytest.raises(InputError, match=r"model\.num_layers=3: settled by the training"):
        load_model(make_run(tmp_path / "run"), words=["model.num_layers=3"])
