"""Instruction samples: several conversations in one row, with a loss on the assistant's answers only.

Conversations are put, in random order, into the fullest row that has room. They do not attend to each other: each is a
segment of its own with positions from 0. Shapes: B batch, S sequence, n conversations, r rows.
"""

from __future__ import annotations

import logging

import numpy as np

from megajax.config.base import InputError
from megajax.config.data import DataConfig
from megajax.data.cache import fingerprint, load_or_build
from megajax.data.dataset import Batch
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.tokenizers import Tokenizer
from megajax.data.vocabulary import check_vocabulary

log = logging.getLogger(__name__)


class InstructionDataset:
    """Pack conversations of a token file made by `corpus.conversations`.

    A conversation longer than a row loses its end; one that would lose all its answers is left out. A warning counts
    both.

    Args:
        selection: conversations, with context and answers as alternating sequences.
        config: sequence length.
        tokenizer: tokenizer of the file; ids outside its vocabulary are refused when read.

    Raises:
        InputError: the file holds no conversations, or no answer fits into a row.
    """

    def __init__(self, selection: Selection[IndexedDataset], config: DataConfig, tokenizer: Tokenizer):
        S, lengths, bounds = config.seq_length, selection.indexed.lengths, selection.bounds
        self._indexed, self._seq_length, self._vocab_size = selection.indexed, S, tokenizer.vocab_size
        if ((bounds[:, 1] - bounds[:, 0]) % 2).any():
            raise InputError(
                f"{selection.indexed.bin_path}: not made from conversations: give the records as data.text"
            )
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        tokens = ends[bounds[:, 1]] - ends[bounds[:, 0]]
        given = ends[np.minimum(bounds[:, 0] + 1, bounds[:, 1])] - ends[bounds[:, 0]]
        usable = (given <= S) & (tokens > 1)
        _say_what_is_cut(selection.where, tokens, usable, S)
        self._bounds = bounds[usable]
        settings = (S, selection.num_samples, selection.seed)
        self.fingerprint = fingerprint("InstructionDataset", lengths, bounds, *settings)
        self._conversations, self._row_ends = load_or_build(
            selection.cache_dir,
            self.fingerprint,
            ["conversations", "row_ends"],
            lambda: pack(np.minimum(tokens[usable] - 1, S), *settings),
        )
        self.epochs = len(self._conversations) // len(self._bounds)

    def __len__(self) -> int:
        return len(self._row_ends) - 1

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples [B]; a number past the end gives an empty row.

        Returns:
            tokens, labels, positions, segment_ids int32 [B, S], loss_mask float32 [B, S], sample_ids uint32 [B].
            Padding is a segment of its own.
        """
        shape = (len(sample_ids), self._seq_length)
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "labels", "positions", "segment_ids")}
        batch["loss_mask"] = np.zeros(shape, np.float32)
        batch["sample_ids"] = sample_ids.astype(np.uint32)
        for row, sample in enumerate(sample_ids.tolist()):
            if sample >= len(self):
                continue
            start = 0
            first, stop = self._row_ends[sample : sample + 2].tolist()
            for segment, conversation in enumerate(self._conversations[first:stop].tolist()):
                tokens, is_answer = self._read(conversation)
                here = np.s_[row, start : start + len(tokens) - 1]
                batch["tokens"][here], batch["labels"][here] = tokens[:-1], tokens[1:]
                batch["loss_mask"][here] = is_answer[1:]
                batch["positions"][here] = np.arange(len(tokens) - 1)
                batch["segment_ids"][here] = segment
                start += len(tokens) - 1
            batch["segment_ids"][row, start:] = stop - first
        return batch

    def _read(self, conversation: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens [<= S+1] of a conversation, and whether each of them belongs to an answer."""
        turns = [self._indexed[i] for i in range(*self._bounds[conversation].tolist())]
        tokens = np.concatenate(turns)[: self._seq_length + 1]
        check_vocabulary(tokens, self._vocab_size, self._indexed.bin_path)
        is_answer = np.repeat(np.arange(len(turns)) % 2, [*map(len, turns)])
        return tokens, is_answer[: self._seq_length + 1]


def _say_what_is_cut(where: str, tokens: np.ndarray, usable: np.ndarray, seq_length: int) -> None:
    cut, left_out = np.count_nonzero(usable & (tokens > seq_length + 1)), np.count_nonzero(~usable)
    if not usable.any():
        raise InputError(f"{where} has {len(tokens)} conversations but no answer within data.seq_length {seq_length}")
    if cut or left_out:
        log.warning(
            "%s: of %d conversations %d lose their end to data.seq_length %d, %d are left out: no answer within it",
            where, len(tokens), cut, seq_length, left_out,
        )  # fmt: skip


def pack(sizes: np.ndarray, capacity: int, num_samples: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle and pack conversations, epoch after epoch, into at least `num_samples` rows (None: one epoch).

    Args:
        sizes: number of places that each conversation takes [n], 1 to `capacity`.
        capacity: number of places in a row.
        num_samples: smallest number of rows.
        seed: seed of the shuffles of conversations and of rows.

    Returns:
        The conversations in the order of the rows, and the start of each row in it and the end of the last [r+1].
    """
    rng = np.random.RandomState(seed)
    orders: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    rows_made = 0
    while not orders or rows_made < (num_samples or 0):
        order = rng.permutation(len(sizes))
        rows = best_fit(sizes[order], capacity)
        number = rng.permutation(rows.max() + 1)[rows]
        orders.append(order[np.argsort(number, kind="stable")])
        counts.append(np.bincount(number))
        rows_made += len(counts[-1])
    return np.concatenate(orders), np.cumsum([0, *np.concatenate(counts)])


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each item: the fullest row with room, among equals the one last used, or else a new one."""
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set if a row has room r: bit arithmetic finds the least room that is enough
    rows, made = [], 0
    for size in sizes.tolist():
        if enough := rooms >> size:
            room = size + (enough & -enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row, made = capacity, made, made + 1
        rows.append(row)
        if size < room:
            by_room[room - size].append(row)
            rooms |= 1 << (room - size)
    return np.array(rows)
