"""Documents and prompts begin alike, with the beginning-of-sequence id if the tokenizer or the user wants it."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from megajax.config import Config, DataConfig, InputError, TokenizerConfig
from megajax.corpus.corpus import preprocess
from megajax.data.build import build_datasets
from megajax.data.indexed import IndexedDataset
from megajax.data.samples import Recipe
from megajax.data.tokenizers import build_tokenizer
from megajax.inference.trained import TrainedModel
from megajax.preprocess import main

TEXTS = ["hello world", "", "the world says hello", "and the other world too"] * 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A byte-level BPE whose tokenizer.json puts <bos> before texts."""
    tiny = tokenizers.ByteLevelBPETokenizer()
    tiny.train_from_iterator(TEXTS, vocab_size=270, show_progress=False, special_tokens=["<|endoftext|>", "<bos>"])
    tiny._tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 1)])
    tiny._tokenizer.save(str(tmp_path / "tok.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<|endoftext|>"}')
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path / "tok.json"


@pytest.mark.parametrize(("words", "bos"), [([], True), (["--no-append-bos"], False), (["--append-bos"], True)])
def test_documents_begin_as_prompts_do(file: Path, words: list[str], bos: bool, tmp_path: Path) -> None:
    """Ids of a prompt are the ids trained on; an empty document stays empty."""
    prefix = tmp_path / "out"
    given = ["--tokenizer-type", "huggingface", "--tokenizer-model", str(file), *words]
    assert main(["--input", str(tmp_path / "corpus.jsonl"), "--output-prefix", str(prefix), *given]) == 0
    tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", model=str(file), bos=bos if words else None))
    trained = TrainedModel(None, tokenizer, Config(), prefix=tokenizer.prefix)
    made = IndexedDataset(f"{prefix}_text_document")
    documents = [made.get(i).tolist() for i in range(len(made))]
    assert documents == [[*trained.encode(text), 0] for text in TEXTS if text]
    assert all((document[0] == 1) == bos for document in documents)


def test_sentences_of_masked_models_do_not(file: Path, tmp_path: Path) -> None:
    config = TokenizerConfig(type="huggingface", model=str(file))
    report = preprocess([tmp_path / "corpus.jsonl"], tmp_path / "s", config, append_eod=False, split_sentences=True)
    made = IndexedDataset(report.prefix)
    assert 1 not in np.concatenate([made.get(i) for i in range(len(made))])


def test_a_tokenizer_without_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.bos is true, but this null tokenizer has no beginning"):
        build_tokenizer(TokenizerConfig(type="null", vocab_size=5, bos=True))


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        (False, True, "do not begin with id 1"),
        (True, False, "begin with id 1, the"),
        (True, True, ""),
        (False, False, ""),
    ],
)
def test_token_files_that_begin_otherwise(
    file: Path, written: bool, read: bool, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of another convention than that of the prompts are told apart before training."""
    caplog.set_level(logging.WARNING)
    config = TokenizerConfig(type="huggingface", model=str(file), bos=written)
    report = preprocess([tmp_path / "corpus.jsonl"], tmp_path / "b", config)
    tokenizer = build_tokenizer(replace(config, bos=read))
    config = DataConfig(path=(report.prefix,), seq_length=4, split="1,0,0")
    build_datasets(Recipe(config, tokenizer), {"train": 2}, 1)
    assert (message in caplog.text) if message else (caplog.text == "")
