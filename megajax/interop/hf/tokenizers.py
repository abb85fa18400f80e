"""Choice of the tokenizer that comes with a Hugging Face model, and writing of a run's as files for transformers.

An exported tokenizer has the same ids, the same text and the same special tokens. Whatever its kind and however its
files were called, it becomes one tokenizer.json, which transformers runs as it is (class PreTrainedTokenizerFast), with
the names of the special tokens in tokenizer_config.json. Both tokenizers read a page of awkward texts before anything
is written.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from megajax.config import Config, InputError, ModelConfig, TokenizerConfig
from megajax.corpus.chat import roles_as_text
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.data.tokenizers.beside import BESIDE
from megajax.data.tokenizers.tokenizer import ROLES
from megajax.interop.hf.files import Source, carried, read_json
from megajax.training.run_directory import RunDirectory

log = logging.getLogger(__name__)

_CLASS = "PreTrainedTokenizerFast"
_REBUILT = ("qwen2",)
"""Values of model_type for which transformers (5) takes no tokenizer.json as it is, but its own cutting of texts,
unless code comes with the model. It asks nobody: where that code is not trusted, the file is taken as it is."""
_CODE = ("exported_tokenizer", "ExportedTokenizer")
"""Module and class of that code, which does the same for those who trust it (`trust_remote_code=True`)."""
_MODULE = f'''"""The tokenizer of this model is tokenizer.json as it is."""

from transformers import {_CLASS}


class {_CODE[1]}({_CLASS}):
    """Nothing is added to what transformers does with the file."""
'''
PROBES = (
    "", " ", "  ", "a", " a", "a ", " two  spaces,   three ", "a\nb", "a\n\nb\n", "a\r\nb\r\n", "\t\ta\tb", "A B c",
    "def f(x):\n    return  x  # 3.14 + 1234567\n", "Grüße, Ångström; naïve café", "e\u0301 a\u0308 combined",
    "ﬁ Ⅷ ①", "Русский текст", "日本語のテキスト。", "中文 文本，全角", "한국어 텍스트", "نص عربي",
    "हिन्दी पाठ", "ข้อความภาษาไทย", "Ελληνικά", "emoji \U0001f917 \U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3fd",
    "a\u00a0b\u200bc\u3000d", "\u2581a\u2581",
    "x" * 70, " " * 30 + "x" + " " * 9, "<s>a</s> <unk><pad><0x0A>", "[CLS] a [MASK] b[SEP]", "a<|endoftext|>b",
    "\x00\x7f",
)  # fmt: skip
"""Texts in which tokenizers differ: spaces, line ends, many scripts, names of special tokens."""


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, *, model_type: str, longest: int, names_are_text: bool, family: str = "gpt"
) -> bool:
    """Write tokenizer.json and tokenizer_config.json, or only a note if they would not mean the same.

    Args:
        tokenizer: the tokenizer of the run.
        folder: directory of the exported model.
        model_type: value of `model_type` in the exported config.json.
        longest: longest text that the model sees, in tokens.
        names_are_text: whether the name of a special token in a text is text, as in training, and not that token.
        family: family of our model; texts of a bert stand between [CLS] and [SEP], and those of a t5 may have an end.

    Returns:
        True if the tokenizer could be written. If not, a warning says why, and transformers refuses to load one.
    """
    about: dict[str, Any] = {"tokenizer_class": _CLASS}
    for name in BESIDE:  # of a tokenizer that came with the model
        (folder / name).unlink(missing_ok=True)
    try:
        fast = tokenizer.as_fast()
        _check_same(tokenizer, fast)
    except InputError as error:
        log.warning("the exported model has no tokenizer, since transformers would give other ids: %s", error)
        _write_json(about, folder / "tokenizer_config.json")
        return False
    names = {role: fast.id_to_token(i) for role in ROLES if (i := tokenizer.id_for(role)) is not None}
    before, after = tokenizer.prefix, tokenizer.suffix if family == "t5" else ()
    if family == "bert" and tokenizer.cls_id is not None and tokenizer.sep_id is not None:
        before, after = (tokenizer.cls_id,), (tokenizer.sep_id,)
    fast.add_special_tokens(list(names.values()))
    fast.post_processor = _around(fast, before, after)
    if model_type in _REBUILT:
        about["auto_map"] = {"AutoTokenizer": [".".join(_CODE)] * 2}
        (folder / f"{_CODE[0]}.py").write_text(_MODULE, encoding="utf-8")
    about |= {f"{role}_token": name for role, name in names.items()}
    about |= {
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": names_are_text,
    }
    if tokenizer.chat_template is not None:
        about["chat_template"] = tokenizer.chat_template
    fast.save(str(folder / "tokenizer.json"))
    _write_json(about, folder / "tokenizer_config.json")
    return True


def _check_same(tokenizer: Tokenizer, fast: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer that gives other ids or texts.

    Raises:
        InputError: they do; the message names the first text.
    """
    size = max(fast.get_vocab().values()) + 1
    if size != tokenizer.vocab_size:
        raise InputError(f"{size} ids for {tokenizer.vocab_size}")
    fast.encode_special_tokens = True
    for text in tokenizer.probes(PROBES):
        try:
            ids = tokenizer.encode(text)
        except InputError:  # it has nothing for unknown words, and neither has the other
            continue
        if fast.encode(text, add_special_tokens=False).ids != ids:
            raise InputError(f"{text!r} becomes other ids")
        if fast.decode(ids, skip_special_tokens=False) != tokenizer.decode(ids):
            raise InputError(f"the ids of {text!r} become another text")


def _around(fast: tokenizers.Tokenizer, before: Sequence[int], after: Sequence[int]) -> processors.TemplateProcessing:
    """Make a processor that puts tokens before and after a text; a second text has the latter behind it as well."""
    first, last = ([fast.id_to_token(i) for i in ids] for ids in (before, after))
    single, second = [*first, "$A", *last], ["$B:1", *(f"{name}:1" for name in last)]
    special = [*zip(first, before, strict=True), *zip(last, after, strict=True)]
    return processors.TemplateProcessing(single, [*single, *second], special)


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def usable_tokenizer(folder: Path, model: ModelConfig) -> TokenizerConfig:
    """Choose the tokenizer that came with a model in a folder, or plain ids if none of use came."""
    assert model.vocab_size is not None
    config = _tokenizer_in(folder, model.family)
    ids = TokenizerConfig(type="null", vocab_size=model.vocab_size - 1)  # and one that ends documents
    if config is None:
        log.warning("the model has no tokenizer: texts are read as token ids")
        return ids
    try:
        size = build_tokenizer(config).vocab_size
    except InputError as error:
        log.warning("its tokenizer is of no use, texts are read as token ids: %s", error)
        return ids
    if size > model.vocab_size:
        log.warning("its tokenizer has %d ids, the model %d: texts with the others are refused", size, model.vocab_size)
    return config


def _tokenizer_in(folder: Path, family: str) -> TokenizerConfig | None:
    """Name the tokenizer that came with a model of a family in a folder, if one did."""
    there = {path.name: str(path) for path in carried(folder)}
    extra = 100 if family == "t5" else 0
    pieces = next((name for name in there if name.endswith(".model")), None)
    if "tokenizer.json" in there:
        return TokenizerConfig(type="huggingface", model=there["tokenizer.json"], extra_ids=extra)
    if pieces:
        return TokenizerConfig(type="sentencepiece", model=there[pieces], extra_ids=extra, extra_ids_descend=extra > 0)
    if "vocab.txt" in there:
        about = there.get("tokenizer_config.json")
        lower = read_json(Path(about)).get("do_lower_case", True) if about else True
        return TokenizerConfig(type="bert_wordpiece", vocab=there["vocab.txt"], lower_case=lower, append_ends=False)
    if "vocab.json" in there and "merges.txt" in there:
        return TokenizerConfig(type="gpt2_bpe", vocab=there["vocab.json"], merges=there["merges.txt"])
    return None


def came_with_model(run: RunDirectory, config: Config) -> bool:
    """Tell whether ids mean what they meant to the model that a run was made of.

    They do if the run has the tokenizer that came with its model, and if it has plain ids because no tokenizer of use
    came.
    """
    if config.tokenizer.type == "null":
        return run.huggingface.is_dir()
    came = _tokenizer_in(run.huggingface, config.model.family)
    if came is None:
        return False
    one, other = (build_tokenizer(tokenizer) for tokenizer in (came, config.tokenizer))
    return one.identity == other.identity


def export_tokenizer(run: RunDirectory, config: Config, out: Path, settings: dict[str, Any]) -> None:
    """Write a run's tokenizer for transformers: the files that came with its model, if ids still mean the same.

    Args:
        run: run that is exported.
        config: configuration of the run.
        out: directory of the exported model.
        settings: config.json of that model, into which ids of special tokens that have changed are put.
    """
    came = came_with_model(run, config)
    for path in carried(run.huggingface) if came else ():
        shutil.copyfile(path, out / path.name)
    theirs = None
    if came and config.tokenizer.type != "null" and (named := _tokenizer_in(run.huggingface, config.model.family)):
        theirs = build_tokenizer(named)
    ours = _own_tokenizer(config)
    if not came or (theirs and _habits(theirs) != _habits(ours)):
        _write_own_tokenizer(ours, config, out, settings["model_type"])
    if theirs:
        _tell_changed_ids(theirs, ours, out, settings)


def _habits(tokenizer: Tokenizer) -> tuple[object, ...]:
    """Return how a tokenizer begins texts, writes chats and uses special tokens."""
    return (tokenizer.prefix, tokenizer.chat_template, [tokenizer.id_for(role) for role in ROLES])


def _tell_changed_ids(theirs: Tokenizer, ours: Tokenizer, out: Path, settings: dict[str, Any]) -> None:
    """Write which tokens begin, end and pad texts now into the settings and into generation_config.json.

    Tokens that ended texts before still do, as in generation here.
    """
    before, now = (special_ids(tokenizer, settings["model_type"]) for tokenizer in (theirs, ours))
    changed = {key: number for key, number in now.items() if before[key] != number}
    generation = out / "generation_config.json"
    documents = [settings, *([read_json(generation)] if generation.is_file() else [])]
    for document in documents if changed else ():
        ends = document.get("eos_token_id")
        document.update(changed)
        if "eos_token_id" in changed and ends is not None:
            document["eos_token_id"] = list(dict.fromkeys([now["eos_token_id"], *_as_list(ends)]))
    if changed and generation.is_file():
        generation.write_text(json.dumps(documents[1], indent=2) + "\n", encoding="utf-8")


def _own_tokenizer(config: Config) -> Tokenizer:
    """Build the tokenizer of a run, with a chat template that says how its conversations were written."""
    tokenizer = build_tokenizer(config.tokenizer)
    if config.data.kind == "instruction" and tokenizer.chat_template is None:
        tokenizer.chat_template = roles_as_text(tokenizer)
    return tokenizer


def _write_own_tokenizer(tokenizer: Tokenizer, config: Config, out: Path, model_type: str) -> None:
    """Write the tokenizer of a run as files that transformers reads.

    In the texts that a decoder was trained on, the name of a special token was text; what is written for other models,
    for chats and for gaps to be filled holds such names as the tokens themselves.
    """
    family, rows = config.model.family, config.model.vocab_size
    if rows is not None and tokenizer.vocab_size > rows:
        log.warning(
            "the exported tokenizer has %d ids, the model %d: it cannot read the others", tokenizer.vocab_size, rows
        )
    plain = family == "gpt" and not config.data.fim_rate and tokenizer.chat_template is None
    write_tokenizer(
        tokenizer, out,
        model_type=model_type, longest=config.model.max_positions, names_are_text=plain, family=family,
    )  # fmt: skip


def special_ids(tokenizer: Tokenizer, model_type: str) -> dict[str, int | None]:
    """Return the ids of special tokens by their keys in config.json."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eod_id, "pad": tokenizer.pad_id}
    if model_type == "t5":
        ids["decoder_start"] = tokenizer.start_id
    return {f"{role}_token_id": number for role, number in ids.items()}


def leave_tokenizer_behind(folder: Path, tokenizer: Tokenizer) -> None:
    """Remove the files in a folder that go with the ids of a model's tokenizer, as the run has another one."""
    names = [path.name for path in carried(folder)]
    for name in names:
        (folder / name).unlink()
    file = folder / "config.json"
    settings = read_json(file)
    settings |= special_ids(tokenizer, settings["model_type"])
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if names:
        log.warning("another tokenizer than the model's: left behind are its %s", ", ".join(names))


def check_ids(files: Source) -> None:
    """Refuse special tokens that are no ids; several may end a text.

    Raises:
        InputError: the message names the first.
    """
    generation = files.directory / "generation_config.json"
    documents = {"config.json": files.settings}
    if generation.is_file():
        documents[generation.name] = read_json(generation)
    for name, document in documents.items():
        for role in ("bos", "eos", "pad", "decoder_start"):
            ids = document.get(f"{role}_token_id")
            for number in _as_list(ids):
                if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                    raise InputError(f"{files.directory / name}: {role}_token_id is {ids!s:.60}, no id: correct it")


def _as_list(ids: Any) -> list[Any]:
    return ids if isinstance(ids, list) else [ids]
