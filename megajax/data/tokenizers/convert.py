"""Conversion of SentencePiece models and tiktoken ranks to the `tokenizers` library, with the same ids.

A SentencePiece model file lists all steps that are done to a text; each has a counterpart here:

    characters by a table      Precompiled             pieces by score        BPE by merges, or Unigram
    spaces at ends, doubled    Replace                 bytes, unknown text    byte fallback, fused
    a space in front           Prepend                 spaces as U+2581       Replace, and back by the decoder

SentencePiece sums scores in 32 bits, so in very long texts it may break a tie of a Unigram model differently (10 of the
54,991 ids of a play).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from megajax.config.base import InputError

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNKNOWN_MARK = "\ufdd0"
"""Stand-in (no character) for unknown text until leading spaces are removed, so that those of its sign remain."""
_NEVER = -1e6
"""Score with which a piece is never chosen if the text can be cut otherwise."""


def from_sentencepiece(model: bytes) -> tokenizers.Tokenizer:
    """Make the tokenizer of a serialised SentencePiece model.

    Raises:
        InputError: the model does something that the library cannot do.
    """
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    kinds = {_UNIGRAM: _unigram, _BPE: _bpe}
    unused = any(piece.type == _UNUSED for piece in proto.pieces)
    if trainer.model_type not in kinds or trainer.treat_whitespace_as_suffix or not spec.escape_whitespaces or unused:
        raise InputError("a SentencePiece model of words or characters, with unused pieces or with spaces as suffixes")
    tokenizer = kinds[trainer.model_type](proto)
    tokenizer.normalizer = normalizers.Sequence(list(_normalizers(spec)))
    tokenizer.decoder = decoders.Sequence(list(_decoders(trainer, spec, proto.pieces[trainer.unk_id].piece)))
    own = [piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    for piece in own:  # one by one, so that they keep their ids in the model
        special = piece.type != _USER_DEFINED
        tokenizer.add_tokens([AddedToken(piece.piece, normalized=False, special=special)])
    return tokenizer


def _normalizers(spec: Any) -> Iterator[normalizers.Normalizer]:
    if spec.precompiled_charsmap:
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(Regex("^ +"), "")
        yield normalizers.Replace(Regex(f"[ {_SPACE}]+$"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(_SPACE)
    yield normalizers.Replace(" ", _SPACE)


def _decoders(trainer: Any, spec: Any, unknown: str) -> Iterator[decoders.Decoder]:
    yield decoders.Replace(unknown, _UNKNOWN_MARK)
    yield decoders.Replace(_SPACE, " ")
    yield decoders.ByteFallback()
    yield decoders.Fuse()
    if spec.remove_extra_whitespaces:
        yield decoders.Replace(Regex("^ +"), "")
    elif spec.add_dummy_prefix:
        yield decoders.Strip(" ", 1, 0)
    yield decoders.Replace(_UNKNOWN_MARK, trainer.unk_surface)


def _bpe(proto: Any) -> tokenizers.Tokenizer:
    """Make a BPE that merges two pieces into a third, better ones first and leftmost among equals."""
    vocabulary = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (_NORMAL, _USER_DEFINED)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: (-scores[piece], vocabulary[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    bytes_too = proto.trainer_spec.byte_fallback
    return tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too)
    )


def _unigram(proto: Any) -> tokenizers.Tokenizer:
    """Make a Unigram model, which cuts a text into its likeliest pieces, but never into the names of control pieces or
    bytes.
    """
    names = [piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL, _BYTE)]
    letters = set("".join(piece.piece for piece in proto.pieces if piece.type == _NORMAL))
    pieces = [(piece.piece, piece.score if piece.type == _NORMAL else _NEVER) for piece in proto.pieces]
    model = models.Unigram(pieces, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)
    tokenizer = tokenizers.Tokenizer(model)
    # A name with an unknown letter in it would still be likelier than its letters, so it is cut beside that letter.
    cuts = [(name[:at], name[at:]) for name in names if (at := _beside_unknown(name, letters))]
    if cuts:
        heads = "|".join(f"{re.escape(head)}(?={re.escape(tail)})" for head, tail in cuts)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(heads), "merged_with_previous")
    return tokenizer


def _beside_unknown(name: str, letters: set[str]) -> int | None:
    """Return where to cut a name without losing a piece: no piece crosses the border of known and unknown letters."""
    return next((at for at in range(1, len(name)) if (name[at - 1] in letters) != (name[at] in letters)), None)


def from_ranks(ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> tokenizers.Tokenizer:
    """Make the tokenizer of a tiktoken vocabulary.

    Args:
        ranks: id of every byte sequence; lower ids are merged earlier.
        special: ids of the special tokens, by name.
        pattern: regular expression by which a text is cut before merging.
    """
    letters = dict(zip(_byte_order(), _letters(), strict=True))
    spelt = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    merges = [
        (spelt[piece[:cut]], spelt[piece[cut:]])
        for piece in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    vocabulary = {spelt[piece]: rank for piece, rank in ranks.items()} | dict(special)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    cuts = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cuts, bytes_as_letters])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(special, key=special.__getitem__))
    return tokenizer


def _byte_order() -> list[int]:
    """List the bytes in the order in which byte-level BPE assigns letters to them: printable ones come first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*printable, *(byte for byte in range(256) if byte not in printable)]


def _letters() -> list[str]:
    """Return the letters of the bytes in that order (GPT-2's table)."""
    return [chr(byte) for byte in _byte_order()[:188]] + [chr(256 + n) for n in range(68)]
