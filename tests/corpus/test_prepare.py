import json
from pathlib import Path

import numpy as np
import pytest

from megajax.config import DataConfig, TokenizerConfig
from megajax.corpus.prepare import prepare_text
from megajax.data.indexed import IndexedDataset
from megajax.data.tokenizers import build_tokenizer


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    messages = [{"role": "user", "content": "How much is 6 x 7?"}, {"role": "assistant", "content": "42"}]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([json.dumps({"messages": messages})] * 5))
    return path


def test_conversations_become_turns(chats: Path, tmp_path: Path):
    """The tokenizer is trained on them as well; what is there already is used again."""
    asked = DataConfig(kind="instruction", text=(str(chats),)), TokenizerConfig(type="sentencepiece", vocab_size=290)
    data, tokenizer = prepare_text(*asked, tmp_path / "run", "instruction")
    indexed, built = IndexedDataset(data.path[0]), build_tokenizer(tokenizer)

    assert len(indexed.document_index) == 6
    assert built.decode(indexed[0].tolist()) == "<|user|>\nHow much is 6 x 7?\n<|assistant|>\n"
    assert built.decode(indexed[1].tolist()) == "42"
    before = Path(f"{data.path[0]}.bin").stat().st_mtime_ns
    assert prepare_text(*asked, tmp_path / "run", "instruction") == (data, tokenizer)
    assert Path(f"{data.path[0]}.bin").stat().st_mtime_ns == before


def test_sentences_for_masked_text(tmp_path: Path):
    pytest.importorskip("nupunkt")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "hello there. Hello again."}))
    asked = DataConfig(text=(str(tmp_path / "a.jsonl"),)), TokenizerConfig(type="bert_wordpiece", vocab_size=40)
    data, tokenizer = prepare_text(*asked, tmp_path / "run", "bert")
    indexed, built = IndexedDataset(data.path[0]), build_tokenizer(tokenizer)

    assert [built.decode(indexed[i].tolist()) for i in range(len(indexed))] == ["hello there.", "hello again."]
    assert not np.isin(built.eod_id, indexed.gather(np.array([0]), np.array([indexed.lengths.sum()])))
