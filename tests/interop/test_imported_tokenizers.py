"""Tokenizers imported with a model give the same ids as transformers, beginnings, ends and sentinels included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from megajax.config import InputError, TokenizerConfig
from megajax.corpus.chat import Chat
from megajax.data.tokenizers import build_tokenizer
from megajax.inference.sample import Options, continue_prompts
from megajax.inference.tasks.scoring import Scorer, Window
from megajax.inference.trained import load_model
from megajax.interop.hf.tokenizers import write_tokenizer
from megajax.interop.hf.transfer import export_model, import_model
from tests.corpus import test_chat as chats
from tests.interop.test_exported_tokenizers import PROBES, TEXTS, byte_level, cased, llama, loaded, t5

TEMPLATE = {"bos_token": "<bos>", "eos_token": "<|endoftext|>"}


def bos_json(folder: Path) -> TokenizerConfig:
    """As LLaMA 3's: a beginning put before texts by the file itself."""
    inner = tokenizers.Tokenizer.from_str(byte_level(folder)._tokenizer.to_str())
    inner.add_special_tokens(["<bos>"])
    inner.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", inner.token_to_id("<bos>"))])
    inner.save(str(folder / "tokenizer.json"))
    return TokenizerConfig(type="huggingface", model=str(folder / "tokenizer.json"))


def imported_t5(folder: Path) -> TokenizerConfig:
    config = t5(folder)
    return TokenizerConfig(type="sentencepiece", model=config.model, extra_ids=100, extra_ids_descend=True)


START = {"480": {"content": "<|im_start|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}}
CASES = {
    "in the file": (bos_json, "llama", TEMPLATE),
    "in the file, and denied in the settings": (bos_json, "llama", TEMPLATE | {"add_bos_token": False}),
    "in the settings": (llama, "llama", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
    "nowhere": (llama, "llama", {"tokenizer_class": "LlamaTokenizer"}),
    "an added token": (llama, "llama", {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": START}),
}


def set_up(folder: Path, make: Any, model_type: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    config = make(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings))
    return build_tokenizer(config), loaded(folder, model_type)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("case", CASES)
def test_beginnings(case: str, tmp_path: Path) -> None:
    """A beginning of sequence stands before texts here where it does there."""
    make, model_type, settings = CASES[case]
    ours, theirs = set_up(tmp_path, make, model_type, settings)
    # SentencePiece has two spaces where a text begins with one, and so do the models; LlamaTokenizer has one
    skipped = (" ", "\u2581") if make is llama else ()
    for text in [text for text in (*PROBES, *TEXTS) if not text.startswith(skipped)]:
        there = theirs(text, split_special_tokens=True)["input_ids"]
        assert there == [*ours.prefix, *ours.encode(text)], text
    assert theirs.bos_token_id == ours.bos_id and theirs.eos_token_id == ours.eod_id
    assert len(theirs) == ours.vocab_size
    if case == "an added token":
        assert ours.encode_marked("<|im_start|>") == [480] == theirs("<|im_start|>")["input_ids"]


@pytest.mark.needs("transformers")
def test_sentinels_of_t5(tmp_path: Path) -> None:
    """T5's own vocabulary counts them down, and its texts end with an end."""
    ours, theirs = set_up(tmp_path, imported_t5, "t5", {"tokenizer_class": "T5Tokenizer", "extra_ids": 100})
    names = [f"<extra_id_{i}>" for i in range(100)]
    assert tuple(theirs.convert_tokens_to_ids(names)) == ours.sentinel_ids
    assert ours.sentinel_ids[0] == ours.vocab_size - 1
    for text in [*TEXTS, "a <extra_id_0> b <extra_id_1>"]:
        assert theirs(text)["input_ids"] == [*ours.encode_marked(text), *ours.suffix], text


def test_cls_is_no_beginning(tmp_path: Path) -> None:
    """Masked samples are given [CLS] and [SEP] when they are cut, so documents are not."""
    inner = build_tokenizer(cased(tmp_path)).as_fast()
    special = [(name, inner.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, special)
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {"cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[EOS]"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(settings))
    ours = build_tokenizer(TokenizerConfig(type="huggingface", model=str(tmp_path / "tokenizer.json")))
    assert (ours.prefix, ours.suffix) == ((), ())
    assert (ours.cls_id, ours.sep_id, ours.eod_id) == tuple(inner.token_to_id(n) for n in settings.values())


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "gemma"])
def test_chats_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Text and ids of `apply_chat_template`, answers and prompts, through an export as well."""
    template = chats.TEMPLATES[name]
    ours = chats.byte_level(tmp_path, template)
    theirs = loaded(tmp_path, "llama")
    (tmp_path / "out").mkdir()
    write_tokenizer(ours, tmp_path / "out", model_type="llama", longest=64, names_are_text=False)
    chat = Chat(ours)
    messages = [message | {"content": message["content"].strip()} for message in chats.MESSAGES]
    for there in (theirs, loaded(tmp_path / "out", "llama")):
        for said in (messages[:1], messages[:3]):
            prompt = there.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
            assert chat.prompt(said) == prompt
        assert chat.text(messages) == there.apply_chat_template(messages, tokenize=False)
        whole = there.apply_chat_template(messages)["input_ids"]
        [turns] = chat.turns([messages])
        learnt_to = [i for turn in turns for i in turn]
        assert learnt_to == whole[: len(learnt_to)]
        assert not ours.decode(whole[len(learnt_to) :]).strip()


@pytest.mark.needs("torch", "transformers")
def test_what_a_run_changed_goes_out_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without the beginning that its tokenizer would put before texts; unchanged, the files are the same."""
    import transformers

    from tests.interop import references

    source = references.saved(references.reference("llama"), tmp_path / "source")
    set_up(source / "..", bos_json, "llama", TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).rename(source / name)
    for words, prefix in ([], (309,)), (["tokenizer.bos=false"], ()):
        out = tmp_path / f"out{len(words)}"
        import_model(source, tmp_path / f"run{len(words)}", words)
        export_model(tmp_path / f"run{len(words)}", out)
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        assert tuple(theirs("")["input_ids"]) == prefix
        same = (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        assert same == (not words)
    assert "its tokenizer has 310 ids, the model 50" in caplog.text
    assert caplog.text.count("the exported tokenizer has 310 ids, the model 50") == 1, "of the one that is written anew"
    trained = load_model(tmp_path / "run0")
    with pytest.raises(InputError, match=r"'.+' has the token '.+' \(\d+\), and the model knows 50"):
        continue_prompts(trained, ["the world"], Options(tokens=1))
    with pytest.raises(InputError, match="and the model knows 50"):
        Scorer(trained)([Window(trained.encode("the world"), 1)])


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("lower_case", [True, False])
def test_a_vocabulary_of_pieces_alone(lower_case: bool, tmp_path: Path) -> None:
    """A BERT that came with vocab.txt alone: no ids that its embedding lacks, so that it can be trained on."""
    from tests.interop import references

    model = references.reference("bert")
    source = references.saved(model, tmp_path / "source")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "world", "##s", ",", "k"]
    pieces += [f"w{i}" for i in range(model.config.vocab_size - len(pieces))]
    (source / "vocab.txt").write_text("\n".join(pieces) + "\n")
    settings = {"do_lower_case": lower_case, "tokenizer_class": "BertTokenizer"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    import_model(source, tmp_path / "run")
    ours, theirs = load_model(tmp_path / "run").tokenizer, loaded(source, "bert")
    assert ours.vocab_size == len(theirs) == model.config.vocab_size
    for text in ["The worlds, the world", "W1 w2\nk", "", "[MASK] the"]:
        assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ours.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode_marked(text)
    for role in ("pad", "unk", "cls", "sep", "mask"):
        assert getattr(theirs, f"{role}_token_id") == ours.id_for(role)
    export_model(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/vocab.txt").read_bytes() == (source / "vocab.txt").read_bytes()
