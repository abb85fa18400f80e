"""Tokenizers as files that Hugging Face's transformers reads: the same ids, the same text, the same special tokens.

Whatever its kind and however its files were called, a tokenizer becomes one tokenizer.json, which transformers runs as
it is (class PreTrainedTokenizerFast), with the names of the special tokens in tokenizer_config.json. Both tokenizers
read a page of awkward texts before anything is written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from megajax.config.base import InputError
from megajax.data.tokenizers.beside import BESIDE
from megajax.data.tokenizers.tokenizer import ROLES, Tokenizer

log = logging.getLogger(__name__)

_CLASS = "PreTrainedTokenizerFast"
_REBUILT = ("qwen2",)
"""Values of model_type for which transformers (5) takes no tokenizer.json as it is, but its own cutting of texts,
unless code comes with the model. It asks nobody: where that code is not trusted, the file is taken as it is."""
_CODE = ("exported_tokenizer", "ExportedTokenizer")
"""That code, a module and its class, which does the same for those who do trust it (`trust_remote_code=True`)."""
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
    """Write tokenizer.json and tokenizer_config.json; or, if they would not mean the same, only what says so.

    Args:
        tokenizer: of the run.
        folder: of the exported model.
        model_type: as in its config.json.
        longest: text that the model sees, in tokens.
        names_are_text: the name of a special token in a text is text, as in training, and not that token.
        family: of our model: texts of a bert stand between [CLS] and [SEP], and those of a t5 may have an end.

    Returns:
        Whether the tokenizer could be written. If not, a warning says why, and transformers refuses to load one.
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
        InputError: it names the first text.
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
    """What puts tokens before and after a text; a second text has the latter behind it as well."""
    first, last = ([fast.id_to_token(i) for i in ids] for ids in (before, after))
    single, second = [*first, "$A", *last], ["$B:1", *(f"{name}:1" for name in last)]
    special = [*zip(first, before, strict=True), *zip(last, after, strict=True)]
    return processors.TemplateProcessing(single, [*single, *second], special)


def _write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
