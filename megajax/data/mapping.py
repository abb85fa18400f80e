"""Mapping from samples of masked text to sentences, row by row the same as Megatron-LM's for BERT and T5.

Sentences of a document are gathered until they reach the target length, which is usually the longest possible one, and
sometimes a random shorter one. The rows are shuffled with the 64-bit Mersenne twister of the C++ library
(std::mt19937_64), which NumPy lacks. Shapes: n samples, s sentences.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

import numpy as np

from megajax.config.base import InputError
from megajax.data.cache import fingerprint, load_or_build
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.vocabulary import check_vocabulary

log = logging.getLogger(__name__)

_LONGEST_SENTENCE = 512
_MUCH = 0.3
_N, _M = 312, 156
_DRAWS = 64 * _N
_LOW = np.uint64(2**31 - 1)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_TEMPER = tuple(map(np.uint64, (0x5555555555555555, 0x71D67FFFEDA60000, 0xFFF7EEE000000000)))


class SentenceMap:
    """Provide the sentences of samples from some documents of a sentence file.

    Args:
        selection: documents of the file, one sequence per sentence.
        longest: largest number of tokens in a sample.
        short_prob: share of the samples with a shorter target, rounded to one in a whole number.
        min_sentences: smallest number of sentences in a sample; documents with fewer are left out.
        vocab_size: size of the vocabulary; ids outside it are refused when read.

    Attributes:
        rows: first sentence, sentence after the last one and target length of every sample, uint32 [n, 3].
        epochs: number of passes over the documents.
        fingerprint: hash of all inputs of the rows.

    Raises:
        InputError: no document has enough sentences; on reading, a token id is outside the vocabulary.
    """

    def __init__(
        self, selection: Selection[IndexedDataset], longest: int, short_prob: float, min_sentences: int, vocab_size: int
    ):
        if longest < 2:
            raise InputError(f"data.seq_length leaves {longest} tokens for text: set a longer one")
        self._indexed, self._vocab_size = selection.indexed, vocab_size
        lengths, bounds = selection.indexed.lengths, selection.bounds
        usable = _usable_documents(bounds, lengths, min_sentences)
        _say_what_is_left_out(selection.where, bounds, usable, min_sentences)
        settings = (selection.num_samples, longest, short_prob, selection.seed, min_sentences)
        self.fingerprint = fingerprint("SentenceMap", lengths, bounds, *settings)
        (self.rows,) = load_or_build(
            selection.cache_dir,
            self.fingerprint,
            ["mapping"],
            lambda: [build_mapping(bounds[usable], lengths, *settings)],
        )
        _say_what_is_cut(selection.where, self.rows, lengths)
        self.epochs = int(np.count_nonzero(self.rows[:, 0] == bounds[usable][0, 0]))

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, sample: int) -> tuple[list[np.ndarray], int]:
        """Return the sentences of a sample and its target length."""
        first, stop, target = self.rows[sample].tolist()
        sentences = [self._indexed[i] for i in range(first, stop)]
        check_vocabulary(np.concatenate(sentences), self._vocab_size, self._indexed.bin_path)
        return sentences, target


def _usable_documents(bounds: np.ndarray, lengths: np.ndarray, min_sentences: int) -> np.ndarray:
    """Tell whether each document has enough sentences and, unless it has only one, no overlong sentence."""
    overlong = np.concatenate([[0], np.cumsum(lengths > _LONGEST_SENTENCE)])
    count = bounds[:, 1] - bounds[:, 0]
    short = overlong[bounds[:, 1]] == overlong[bounds[:, 0]]
    return (count >= max(min_sentences, 1)) & (short | (count == 1))


def _say_what_is_left_out(where: str, bounds: np.ndarray, usable: np.ndarray, min_sentences: int) -> None:
    enough = int(np.count_nonzero(bounds[:, 1] - bounds[:, 0] >= min_sentences))
    long = enough - int(np.count_nonzero(usable))
    if not usable.any():
        sentences = "sentence" if min_sentences == 1 else "sentences"
        but = f", {long} of them with a sentence of over {_LONGEST_SENTENCE} tokens" if long else ""
        remedy = "split the text into sentences (preprocess --split-sentences)"
        raise InputError(
            f"{where} needs documents with at least {min_sentences} {sentences}; found {enough} of {len(bounds)}{but}: "
            + (f"{remedy}, or set model.pair_task=false" if min_sentences > 1 else remedy)
        )
    if long:
        log.warning("%s: left out %d documents with a sentence of over %d tokens", where, long, _LONGEST_SENTENCE)


def _say_what_is_cut(where: str, rows: np.ndarray, lengths: np.ndarray) -> None:
    """Log how much text exceeds the target lengths of its samples, which end with whole sentences."""
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    first, stop, target = rows.T.astype(np.int64)
    tokens = ends[stop] - ends[first]
    share = np.maximum(tokens - target, 0).sum() / max(tokens.sum(), 1)
    if share > _MUCH:
        remedy = "split the text into sentences (preprocess --split-sentences), or raise data.seq_length"
        log.warning("%s: %.0f %% of the text is beyond the ends of its samples: %s", where, 100 * share, remedy)
    else:
        log.info("%s: %.1f %% of the text is beyond the ends of its samples", where, 100 * share)


def build_mapping(
    bounds: np.ndarray,
    lengths: np.ndarray,
    num_samples: int | None,
    longest: int,
    short_prob: float,
    seed: int,
    min_sentences: int,
) -> np.ndarray:
    """Compute the rows of a `SentenceMap`.

    Args:
        bounds: first sentence, and sentence after the last one, of the documents to use, int64 [documents, 2].
        lengths: number of tokens of every sentence in the file.
        num_samples: number of samples after which the current epoch is the last.
        longest: largest number of tokens in a sample.
        short_prob: share of samples with a shorter target.
        seed: seed of the targets; seed + 1 is that of the shuffle.
        min_sentences: smallest number of sentences in a sample.

    Returns:
        The rows, uint32 [n, 3], or uint64 in a file of 2^32 sentences or more.
    """
    sentences = _ranges(bounds)
    counts = bounds[:, 1] - bounds[:, 0]
    # From here on, sentences of unused documents are not counted.
    ends = np.repeat(np.cumsum(counts), counts)
    tokens = np.concatenate([[0], np.cumsum(lengths[sentences], dtype=np.int64)])
    walk = _Walk(tokens, ends, min_sentences, longest)
    targets = _targets(longest, short_prob, seed)
    cuts, chosen = array("q"), array("q")
    while not cuts or len(cuts) < (num_samples or 0):
        walk.epoch(targets, cuts, chosen)
    stop = np.array(cuts, np.int64)
    start = np.concatenate([[0], stop[:-1] % len(sentences)])
    rows = np.stack([sentences[start], sentences[stop - 1] + 1, np.array(chosen, np.int64)], axis=1)
    wide = len(lengths) > np.iinfo(np.uint32).max
    return rows[shuffled(len(rows), seed + 1)].astype(np.uint64 if wide else np.uint32)


def _ranges(bounds: np.ndarray) -> np.ndarray:
    """Return the numbers of all ranges [first, last) joined, int64."""
    counts = bounds[:, 1] - bounds[:, 0]
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(bounds[:, 0] - before, counts)


def _targets(longest: int, short_prob: float, seed: int) -> Iterator[int]:
    """Iterate over random target lengths: one in round(1 / short_prob) is drawn, from 2 on, and the others are the
    longest.
    """
    one_in = round(1 / short_prob) if short_prob else 0
    stream = np.random.RandomState(seed)
    while True:
        # The generator gives full 32-bit words, as std::mt19937 does.
        draws = np.frombuffer(stream.bytes(4 << 16), "<u4").astype(np.int64)
        targets = np.full_like(draws, longest)
        if one_in:
            short = draws % one_in == 0
            targets[short] = 2 + draws[short] % (longest - 1)
        yield from targets.tolist()


class _Walk:
    """Cut the sentences of all documents into samples, from the first to the last.

    A sample ends where its target is reached, unless that would leave a single sentence of the document; otherwise it
    ends with the document. The ends for the usual target are computed for all sentences at once, and the walk only
    looks them up.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, min_sentences: int, longest: int):
        reached = np.searchsorted(tokens, tokens[:-1] + longest)
        least = np.arange(len(ends)) + min_sentences
        stop = np.maximum(reached, least)
        self._usual = np.where(stop < ends - 1, stop, ends).data
        self._tokens, self._ends = tokens.data, ends.data
        self._longest, self._min_sentences = longest, min_sentences

    def epoch(self, targets: Iterator[int], cuts: array[int], chosen: array[int]) -> None:
        """Append the ends of samples and their targets; one target is drawn per sample, and one more per document."""
        place, end = 0, len(self._ends)
        while place < end:
            target = next(targets)
            stop = self._usual[place] if target == self._longest else self._stop(place, target)
            cuts.append(stop)
            chosen.append(target)
            if stop == self._ends[place]:
                next(targets)
            place = stop

    def _stop(self, place: int, target: int) -> int:
        end = self._ends[place]
        reached = bisect_left(self._tokens, self._tokens[place] + target, place + 1, end)
        stop = max(reached, place + self._min_sentences)
        return stop if stop < end - 1 else end


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """Return the first `count` numbers of std::mt19937_64(seed), uint64 [count]."""
    blocks = list(islice(_blocks(seed), -(-count // _DRAWS)))
    return np.concatenate(blocks)[:count] if blocks else np.empty(0, np.uint64)


def _blocks(seed: int) -> Iterator[np.ndarray]:
    """Iterate over the numbers in blocks so large that only the twister's own time counts.

    The generator is that of Nishimura, "Tables of 64-bit Mersenne Twisters" (2000). The twist of word i reads words i +
    1 and i + 156 (mod 312); for the first half of the words these are old values and for the second half new ones, so
    two vector operations do.
    """
    state = _seeded(seed)
    while True:
        states = []
        for _ in range(_DRAWS // _N):
            first = state[_M:] ^ _twist(state[:_M], state[1 : _M + 1])
            second = first ^ _twist(state[_M:], np.append(state[_M + 1 :], first[0]))
            state = np.concatenate([first, second])
            states.append(state)
        yield _tempered(np.concatenate(states))


def _seeded(seed: int) -> np.ndarray:
    words = [seed % 2**64]
    for i in range(1, _N):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i) % 2**64)
    return np.array(words, np.uint64)


def _twist(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    x = (high & ~_LOW) | (low & _LOW)
    return (x >> np.uint64(1)) ^ np.where(x & np.uint64(1), _MATRIX, np.uint64(0))


def _tempered(x: np.ndarray) -> np.ndarray:
    x = x ^ ((x >> np.uint64(29)) & _TEMPER[0])
    x = x ^ ((x << np.uint64(17)) & _TEMPER[1])
    x = x ^ ((x << np.uint64(37)) & _TEMPER[2])
    return x ^ (x >> np.uint64(43))


def shuffled(count: int, seed: int) -> np.ndarray:
    """Return 0 to count - 1, int64, shuffled as by Fisher and Yates from the end; this takes little more memory than
    the result.

    Number i changes places with number (draw mod i + 1).
    """
    order = np.arange(count)
    places = order.data  # Python accesses it faster than an array
    lasts = range(count - 1, 0, -1)
    for start, draws in zip(range(0, len(lasts), _DRAWS), _blocks(seed), strict=False):
        block = lasts[start : start + _DRAWS]
        partners = draws[: len(block)] % (np.array(block, np.uint64) + np.uint64(1))
        for last, partner in zip(block, partners.tolist(), strict=True):
            places[last], places[partner] = places[partner], places[last]
    return order
