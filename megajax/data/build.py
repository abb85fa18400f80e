"""The training, validation and test dataset that a configuration asks for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax.config.base import ConfigError
from megajax.config.data import DataConfig
from megajax.data.blend import BlendedDataset, Source, parse_data_path, source_sizes
from megajax.data.dataset import Dataset
from megajax.data.gpt import GPTDataset
from megajax.data.indexed import IndexedDataset
from megajax.data.splits import SPLITS, document_range, parse_split
from megajax.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)


def build_datasets(
    config: DataConfig, sizes: Mapping[str, int | None], seed: int, tokenizer: Tokenizer
) -> dict[str, Dataset | None]:
    """Build the dataset of every split.

    Args:
        config: sources, either `path` cut by `split` or one path per split.
        sizes: samples wanted of "train", "valid" and "test"; None = one epoch, 0 or left out = none.
        seed: of the sample order, the same for every source.
        tokenizer: ids outside its vocabulary are refused when read.

    Returns:
        A dataset per split; None where no samples are wanted or the split has no documents.
    """
    paths = {"train": config.train_path, "valid": config.valid_path, "test": config.test_path}
    if bool(config.path) == any(paths.values()):
        raise ConfigError("set either data.path, or data.train_path with data.valid_path and data.test_path")
    parts: dict[str, tuple[float, float] | None] = dict.fromkeys(SPLITS, (0.0, 1.0))
    if config.path:
        paths, parts = dict.fromkeys(SPLITS, config.path), parse_split(config.split)
    builder = _SplitBuilder(config, seed, tokenizer)
    built: dict[str, Dataset | None] = dict.fromkeys(SPLITS)
    for name in SPLITS:
        part, num_samples = parts[name], sizes.get(name, 0)
        if paths[name] and part is not None and num_samples != 0:
            built[name] = builder.build(name, paths[name], part, num_samples)
    return built


class _Part(NamedTuple):
    """The documents of one source that belong to one split."""

    source: Source
    indices: np.ndarray


class _SplitBuilder:
    """Builds the splits of one configuration, opening every token file once."""

    def __init__(self, config: DataConfig, seed: int, tokenizer: Tokenizer):
        self._config, self._seed, self._tokenizer = config, seed, tokenizer
        self._open = cache(IndexedDataset)

    def build(
        self, name: str, path: Sequence[str], bounds: tuple[float, float], num_samples: int | None
    ) -> Dataset | None:
        """Build the split `name` of `num_samples` from a fraction of the documents of every source on a data path."""
        sources = parse_data_path(path)
        parts = [_Part(source, self._documents(source.prefix, bounds, name)) for source in sources]
        parts = [part for part in parts if part.indices.size]
        if num_samples is None:
            parts = [part for part in parts if self._holds_a_sample(part, name)]
        if not parts:
            return None
        # Megatron ignores the weight of a single prefix on a path per split, but blends it on a common path
        if len(sources) == 1 and (sources[0].weight is None or not self._config.path):
            return self._gpt(name, parts[0], num_samples)
        return self._blend(name, parts, num_samples)

    def _documents(self, prefix: str, bounds: tuple[float, float], name: str) -> np.ndarray:
        count = len(self._open(prefix))
        indices = np.array(document_range(bounds, count), np.int32)
        if not indices.size:
            log.warning("%s: its %d documents leave none for the %s split", prefix, count, name)
        return indices

    def _holds_a_sample(self, part: _Part, name: str) -> bool:
        tokens = int(self._open(part.source.prefix).lengths[part.indices].sum(dtype=np.int64))
        if tokens <= self._config.seq_length:
            log.warning(
                "%s: the %d tokens of its %s split make no sample of %d: left out",
                part.source.prefix, tokens, name, self._config.seq_length,
            )  # fmt: skip
        return tokens > self._config.seq_length

    def _gpt(self, name: str, part: _Part, num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            self._open(part.source.prefix),
            part.indices,
            num_samples,
            self._config,
            self._seed,
            name,
            self._tokenizer.eod_id,
            cache_dir=self._cache_dir(part),
            vocab_size=self._tokenizer.vocab_size,
        )

    def _blend(self, name: str, parts: Sequence[_Part], num_samples: int | None) -> BlendedDataset:
        weights = [part.source.weight for part in parts if part.source.weight is not None]
        if weights:
            if num_samples is None:
                return self._until_one_ends(name, parts, weights)
            given, sizes = source_sizes(weights, num_samples)
            datasets = [self._gpt(name, part, size) for part, size in zip(parts, sizes, strict=True)]
            return BlendedDataset(datasets, weights, sum(given), self._cache_dir(parts[0]))
        datasets = [self._gpt(name, part, None) for part in parts]
        lengths = [len(dataset) for dataset in datasets]
        whole = sum(lengths)
        length = whole if num_samples is None else min(num_samples, whole)
        return BlendedDataset(datasets, lengths, length, self._cache_dir(parts[0]))

    def _until_one_ends(self, name: str, parts: Sequence[_Part], weights: Sequence[float]) -> BlendedDataset:
        """Blend one epoch of every source, as far as the first of them lasts."""
        datasets = [self._gpt(name, part, None) for part in parts]
        lasts = [(len(data) - 1) * sum(weights) / weight for data, weight in zip(datasets, weights, strict=True)]
        return BlendedDataset(datasets, weights, max(1, int(min(lasts))), self._cache_dir(parts[0]))

    def _cache_dir(self, part: _Part) -> Path:
        return Path(self._config.cache_dir or Path(part.source.prefix).parent / "cache")
