"""tiktoken vocabularies, run by the `tiktoken` library: byte sequences with the rank in which they are merged."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from megajax.config.base import InputError
from megajax.config.data import TokenizerConfig
from megajax.data.tokenizers.convert import from_ranks
from megajax.data.tokenizers.tokenizer import Tokenizer, file_identity, sentinel_names

# Patterns by which a text is cut before merging: Megatron-LM's two, and LLaMA 3's.
_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_MEGATRON_NAMES = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_LLAMA3_NAMES = ("<|begin_of_text|>", "<|end_of_text|>")
_MEGATRON_SIZE = 2**17


class RankTokenizer(Tokenizer):
    """Tokenize with tiktoken; special ids precede the ranks (.json, Megatron-LM's TikTokenizer) or follow them (LLaMA
    3).

    Args:
        path: file with a .json list of records with rank and token_bytes (base64), or with lines "base64 rank".
        config: fields `tiktoken_*`, the size, and the number of T5 sentinels, which are appended.
    """

    def __init__(self, path: Path, config: TokenizerConfig):
        try:
            import tiktoken  # noqa: PLC0415 - an optional dependency
        except ImportError:
            raise InputError("tokenizer.type tiktoken needs the tiktoken library: pip install tiktoken") from None
        if path.suffix == ".json":
            ranks, special = _megatron_vocabulary(path, config)
            pattern = config.tiktoken_pattern or "v2"
            self.bos_id, self.eod_id, self.unk_id = special["<s>"], special["</s>"], special["<unk>"]
            self.mask_id, self.pad_id = special.get("<mask>"), special.get("<pad>")
            self.cls_id, self.sep_id = special.get("<cls>"), special.get("<sep>")
        else:
            ranks, special = _llama3_vocabulary(path, config)
            pattern = config.tiktoken_pattern or "llama3"
            self.bos_id, self.eod_id = special["<|begin_of_text|>"], special["<|end_of_text|>"]
        size = len(ranks) + len(special)
        sentinels = {name: size + i for i, name in enumerate(sentinel_names(config.extra_ids))}
        self.sentinel_ids = tuple(sentinels.values())
        self.vocab_size = size + len(sentinels)
        self._ranks, self._special, self._pattern = ranks, special | sentinels, _PATTERNS[pattern]
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=self._pattern, mergeable_ranks=ranks, special_tokens=self._special
        )
        self.identity = file_identity("tiktoken", self.vocab_size, path) | {
            "pattern": pattern,
            "special_ids": len(special),
        }

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of some texts."""
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, with special tokens as their names and invalid UTF-8 as U+FFFD."""
        return self._encoding.decode([int(i) for i in ids])

    def as_fast(self) -> tokenizers.Tokenizer:
        """Return the byte-level BPE with the same merges."""
        return from_ranks(self._ranks, self._special, self._pattern)


_Vocabulary = tuple[dict[bytes, int], dict[str, int]]
"""Id of each byte sequence, and id of each special token."""


def _megatron_vocabulary(path: Path, config: TokenizerConfig) -> _Vocabulary:
    """Return special ids first (<unk>, <s>, </s>, ... and fillers), then as many ranks as the vocabulary holds."""
    count = config.tiktoken_special_ids or 1000
    if count < len(_MEGATRON_NAMES):
        raise InputError(f"tokenizer.tiktoken_special_ids {count}: at least {len(_MEGATRON_NAMES)} are in use")
    fillers = [f"<SPECIAL_{i}>" for i in range(len(_MEGATRON_NAMES), count)]
    special = {name: i for i, name in enumerate([*_MEGATRON_NAMES, *fillers])}
    room = (config.vocab_size or _MEGATRON_SIZE) - count
    try:
        records = json.loads(path.read_text(encoding="utf-8"))[: max(room, 0)]
        ranks = {base64.b64decode(record["token_bytes"]): count + record["rank"] for record in records}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a list of rank and token_bytes ({error!r})") from None
    return _whole(path, ranks, count), special


def _llama3_vocabulary(path: Path, config: TokenizerConfig) -> _Vocabulary:
    """Return the ranks first, then <|begin_of_text|>, <|end_of_text|> and reserved ids."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(piece): int(rank) for piece, rank in lines}
    except ValueError as error:
        raise InputError(f'{path}: not lines of "base64 rank" ({error})') from None
    reserved = (config.tiktoken_special_ids or 256) - len(_LLAMA3_NAMES)
    names = [*_LLAMA3_NAMES, *(f"<|reserved_special_token_{i}|>" for i in range(reserved))]
    return _whole(path, ranks, 0), {name: len(ranks) + i for i, name in enumerate(names)}


def _whole(path: Path, ranks: dict[bytes, int], first: int) -> dict[bytes, int]:
    """Return the ranks, after making sure that none is missing and every byte has one."""
    bytes_known = all(bytes([byte]) in ranks for byte in range(256))
    if not bytes_known or set(ranks.values()) != set(range(first, first + len(ranks))):
        raise InputError(f"{path}: ranks or single bytes are missing: not a tiktoken vocabulary")
    return ranks
