"""GPT samples: documents shuffled, joined end to end, cut every S tokens, and the cuts shuffled again.

Every array equals that of Megatron-LM's GPTDataset (document, sample and shuffle index, masks of a batch). Megatron
finds the cuts by a loop over documents; here they have a closed form: row k of the sample index is token k*S of the
joined documents. Shapes: B batch, S sequence, n samples, E epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megajax.config.base import InputError
from megajax.config.data import DataConfig
from megajax.data.cache import fingerprint, load_or_build
from megajax.data.dataset import Batch
from megajax.data.fim import FillInTheMiddle
from megajax.data.indexed import Selection, Tokens
from megajax.data.tokenizers import Tokenizer
from megajax.data.vocabulary import check_vocabulary

_BLOCK = 1 << 16


class SampleOrder(NamedTuple):
    """The three arrays that map a sample number to tokens."""

    document_index: np.ndarray
    """Sequence numbers in the order in which sequences are joined, int32 [E * sequences]."""
    sample_index: np.ndarray
    """Start of each sample, and end of the last one: (position in document_index, token offset in it), [n+1, 2]."""
    shuffle_index: np.ndarray
    """Row of sample_index for each sample number, [n]."""


def count_epochs(tokens: int, num_samples: int | None, seq_length: int) -> int:
    """Return the smallest number of passes over `tokens` that yields the samples and the one token after them."""
    return 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))


def build_sample_order(
    lengths: np.ndarray, indices: np.ndarray, num_samples: int | None, seq_length: int, seed: int
) -> SampleOrder:
    """Compute the order of samples.

    Args:
        lengths: number of tokens of every sequence in the file.
        indices: numbers of the sequences that may be used, int32.
        num_samples: smallest number of samples; None = as many as one epoch has.
        seq_length: length S of a sample in tokens.
        seed: seed of the one random stream for both shuffles.
    """
    tokens = int(lengths[indices].sum(dtype=np.int64))
    epochs = count_epochs(tokens, num_samples, seq_length)
    samples = (epochs * tokens - 1) // seq_length
    before_last = _samples_before_separate_epoch(tokens, epochs, num_samples, seq_length)

    rng = np.random.RandomState(seed)
    documents = np.empty((epochs, len(indices)), np.int64)  # NumPy shuffles 64-bit numbers faster than smaller ones
    documents[:] = indices
    documents = _shuffle_blocks(rng, documents.ravel(), None if before_last is None else (epochs - 1) * len(indices))
    documents = documents.astype(np.int32)
    starts = sample_starts(lengths, documents, samples, seq_length)
    shuffled = _shuffle_blocks(rng, np.arange(samples), before_last)
    return SampleOrder(documents, starts, shuffled.astype(np.uint32 if samples < 2**32 - 2 else np.int64))


def _samples_before_separate_epoch(tokens: int, epochs: int, num_samples: int | None, seq_length: int) -> int | None:
    """Return the number of samples before the last epoch if that epoch is shuffled separately, else None.

    Megatron shuffles the last epoch separately when less than 80 % of it is used, so that its documents do not crowd
    out those of complete epochs.
    """
    if num_samples is None or epochs == 1:
        return None
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    return before_last if num_samples - before_last < int(0.80 * per_epoch) else None


def _shuffle_blocks(rng: np.random.RandomState, values: np.ndarray, cut: int | None) -> np.ndarray:
    """Shuffle values in place; if there is a cut, shuffle the values after it separately."""
    for block in np.split(values, [] if cut is None else [cut]):
        rng.shuffle(block)
    return values


def sample_starts(lengths: np.ndarray, documents: np.ndarray, samples: int, seq_length: int) -> np.ndarray:
    """Return the sample index [samples+1, 2] over sequences in their final order.

    Row k is the place of token k*S of the joined sequences. Sequences without tokens are passed over, except that row 0
    is (0, 0) as in Megatron.
    """
    longest = max(len(documents), int(lengths.max()))
    starts = np.empty((samples + 1, 2), np.int32 if longest <= np.iinfo(np.int32).max else np.int64)
    row = before = 0
    for block in range(0, len(documents), _BLOCK):  # a block stays in the processor's cache
        sizes = lengths[documents[block : block + _BLOCK]]
        ends = np.cumsum(sizes, dtype=np.int64) + before
        before = int(ends[-1])
        cuts = np.arange(row, min(samples, (before - 1) // seq_length) + 1) * seq_length
        position = np.searchsorted(ends, cuts, side="right")
        starts[row : row + len(cuts), 0] = block + position
        starts[row : row + len(cuts), 1] = cuts - (ends[position] - sizes[position])
        row += len(cuts)
    starts[0, 0] = 0
    return starts


class GPTDataset:
    """Provide samples of S+1 tokens from some sequences of one token file.

    Args:
        selection: sequences of the file, each of which is a document.
        config: S, and the treatment of the end of a document.
        tokenizer: tokenizer with the end-of-document id; ids outside its vocabulary are refused when read, and
            fill-in-the-middle cuts between its characters.

    Raises:
        InputError: not a single sample can be made; on reading, a token id is outside the vocabulary.
    """

    def __init__(self, selection: Selection[Tokens], config: DataConfig, tokenizer: Tokenizer):
        indexed, indices, num_samples, seed = selection[:4]
        self._indexed, self._config, self._tokenizer = indexed, config, tokenizer
        self._rearrange = FillInTheMiddle(config, tokenizer, seed) if config.fim_rate else None
        seq_length = config.seq_length
        lengths = indexed.lengths[indices]
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens < (seq_length + 1 if num_samples is None else 1):
            raise InputError(
                f"{selection.where} of {len(indices)} documents has {tokens} tokens and one sample "
                f"needs {seq_length + 1}; add text, enlarge the split or shorten seq_length"
            )
        self.epochs = count_epochs(tokens, num_samples, seq_length)
        self.fingerprint = fingerprint("GPTDataset", lengths, indices, num_samples, seq_length, seed)
        arrays = load_or_build(
            selection.cache_dir,
            self.fingerprint,
            SampleOrder._fields,
            lambda: build_sample_order(indexed.lengths, indices, num_samples, seq_length, seed),
        )
        self.order = SampleOrder(*arrays)

    def __len__(self) -> int:
        return len(self.order.shuffle_index)

    def batch(self, sample_ids: np.ndarray) -> Batch:
        """Return the rows of these samples."""
        real = sample_ids < len(self)
        numbers = np.where(real, sample_ids, 0)
        tokens = self.tokens(numbers)
        lengths = np.full(len(tokens), self._config.seq_length + 1)
        if self._rearrange:
            lengths = self._rearrange(tokens, numbers)
        tokens[~real], lengths[~real] = 0, 0
        return token_batch(tokens, lengths, sample_ids, self._config, self._tokenizer.eod_id)

    def tokens(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of these samples, int32 [B, S+1]; neighbours in the joined documents share one token.

        A sample consists of the end of a document, whole documents and the beginning of one, or of a part of one
        document.
        """
        rows = self.order.shuffle_index[sample_ids].astype(np.int64)
        (first, start), (last, end) = (self.order.sample_index[row].astype(np.int64).T for row in (rows, rows + 1))
        pieces = last - first + 1
        heads = np.cumsum(pieces) - pieces
        tails = heads + pieces - 1
        positions = np.arange(pieces.sum()) + np.repeat(first - heads, pieces)
        documents = self.order.document_index[positions]
        starts = self._indexed.pointers[documents] // self._indexed.dtype.itemsize
        stops = starts + self._indexed.lengths[documents]
        stops[tails] = starts[tails] + end + 1
        starts[heads] += start
        tokens = self._indexed.gather(starts, stops)
        check_vocabulary(tokens, self._tokenizer.vocab_size, self._indexed.bin_path)
        return tokens.astype(np.int32).reshape(len(sample_ids), -1)


def make_batch(samples: Sequence[np.ndarray], sample_ids: np.ndarray, config: DataConfig, eod: int) -> Batch:
    """Return the `token_batch` of B arrays of at most S+1 tokens each."""
    tokens = np.zeros((len(samples), config.seq_length + 1), np.int32)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample)] = sample
    return token_batch(tokens, np.array([len(sample) for sample in samples]), sample_ids, config, eod)


def token_batch(raw: np.ndarray, lengths: np.ndarray, sample_ids: np.ndarray, config: DataConfig, eod: int) -> Batch:
    """Derive labels, loss mask, positions and segments of all samples at once (Megatron-LM GPTDataset masks).

    Padding is known by its place, never by its id: end-of-document targets keep their loss even if the tokenizer pads
    with that id.

    Args:
        raw: tokens and padding, int32 [B, S+1].
        lengths: number of real tokens in each row [B], which padding follows.
        sample_ids: global sample number of each row [B], from which dropout keys follow.
        config: S, and the treatment of the end of a document.
        eod: id of the end of a document.

    Returns:
        tokens, labels, positions int32 [B, S], loss_mask float32 [B, S], sample_ids uint32 [B]; with `reset_attention`
        also segment_ids int32 [B, S]: tokens attend to tokens of the same segment only. Tokens and labels are views of
        `raw`, and positions may be a view of a single row, because copies would take most of the time of a batch.
    """
    tokens, labels = raw[:, :-1], raw[:, 1:]
    steps = np.arange(config.seq_length, dtype=np.int32)
    loss_mask = steps + 1 < lengths[:, None]
    positions = np.broadcast_to(steps, tokens.shape)
    segments = None
    if config.mask_eod_loss or config.reset_positions or config.reset_attention:
        ends = (tokens == eod) & (steps < lengths[:, None])
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        if config.mask_eod_loss:
            loss_mask &= ~ends
        if config.reset_positions:
            positions = steps - np.maximum.accumulate(np.where(begins, steps, 0), axis=1)
        if config.reset_attention:
            segments = np.cumsum(begins, axis=1, dtype=np.int32)
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask.astype(np.float32),
        "positions": positions,
        # Keys only need to differ within a few steps, so wrapping after 4e9 samples is harmless.
        "sample_ids": sample_ids.astype(np.uint32),
    }
    return batch if segments is None else {**batch, "segment_ids": segments}
