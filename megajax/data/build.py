"""Construction of the training, validation and test datasets of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megajax.config.base import InputError
from megajax.config.data import DataConfig
from megajax.data.blend import BlendedDataset, Source, parse_data_path, source_sizes
from megajax.data.consumed import Mix, Reading, TrainingData, go_on
from megajax.data.dataset import Chain, Dataset
from megajax.data.samples import Recipe
from megajax.data.sources import MOCK_SPLIT, SPLITS, Maker, Part, parse_split


def build_datasets(
    recipe: Recipe,
    sizes: Mapping[str, int | None],
    seed: int,
    before: Mix | None = None,
    consumed: int = 0,
    share: tuple[int, int] = (0, 1),
) -> dict[str, Dataset | None]:
    """Build the dataset of every split.

    Args:
        recipe: kind of samples and their sources: either `path` cut by `split` or one path per split.
        sizes: number of samples of "train", "valid" and "test"; None = one epoch, 0 or left out = none.
        seed: seed of the sample order, the same for every source.
        before: mix of sources on which a resumed run was trained.
        consumed: number of samples on which it was trained.
        share: number of this process and count of all, which divide the search for ids outside the vocabulary.

    Returns:
        A dataset per split, a `TrainingData` where its size is a number; None where no samples are wanted or the split
        has no documents.
    """
    config, maker = recipe.config, Maker(recipe, seed)
    built: dict[str, Dataset | None] = dict.fromkeys(SPLITS)
    for name, (path, bounds) in _paths(config).items():
        num_samples = sizes.get(name, 0)
        if not path or bounds is None or num_samples == 0:
            continue
        sources = parse_data_path(path)
        # For a single prefix with a weight, Megatron ignores the weight on a path per split, but blends on a common
        # path.
        if len(sources) == 1 and not config.path:
            sources = [Source(sources[0].prefix, None)]
        parts = [part for part in (maker.part(source, bounds, name) for source in sources) if part.indices.size]
        if num_samples is None:
            built[name] = _one_epoch(maker, parts)
        elif parts:
            resumed = (before, consumed) if name == "train" else (None, 0)
            built[name] = _many_epochs(maker, parts, num_samples, *resumed, alone=len(sources) == 1)
    maker.scan.start(share)
    return built


def _paths(config: DataConfig) -> dict[str, tuple[Sequence[str], tuple[float, float] | None]]:
    """Return the data path of every split, and the fractions of its documents between which the split lies."""
    own = {"train": config.train_path, "valid": config.valid_path, "test": config.test_path}
    if not (config.path or config.train_path or config.mock):
        raise InputError("set either data.path, or data.train_path with data.valid_path and data.test_path")
    if config.train_path:
        return {name: (path, (0.0, 1.0)) for name, path in own.items()}
    split = MOCK_SPLIT if config.mock else config.split
    return {name: (config.path or ("mock",), bounds) for name, bounds in parse_split(split).items()}


def _one_epoch(maker: Maker, parts: Sequence[Part]) -> Dataset | None:
    """Read every source once; read weighted ones in their proportions until the first of them ends."""
    built = [(part, dataset) for part in parts if (dataset := maker.one_epoch(part)) is not None]
    if not built:
        return None
    parts, datasets = [part for part, _ in built], [dataset for _, dataset in built]
    weights = [part.source.weight for part in parts if part.source.weight is not None]
    if weights:
        lasts = [(len(data) - 1) * sum(weights) / weight for data, weight in zip(datasets, weights, strict=True)]
        return BlendedDataset(datasets, weights, max(1, int(min(lasts))), maker.cache_dir(parts[0]))
    if len(datasets) == 1:
        return datasets[0]
    lengths = [len(dataset) for dataset in datasets]
    return BlendedDataset(datasets, lengths, sum(lengths), maker.cache_dir(parts[0]))


def _many_epochs(
    maker: Maker, parts: Sequence[Part], num_samples: int, before: Mix | None, consumed: int, alone: bool
) -> TrainingData:
    """Provide `num_samples` samples: sources with a share run as many epochs as needed, others one epoch.

    Args:
        maker: maker of the datasets.
        parts: parts of the sources that belong to the split.
        num_samples: samples of the run, from its beginning.
        before: mix that was read before.
        consumed: samples of the run so far.
        alone: whether there is one source, which needs neither a share nor a surplus.
    """
    mix = go_on(before, consumed, _readings(parts, alone))
    length = max(1, num_samples - mix.start)
    weights = [source.weight for source in mix.sources if source.weight is not None]
    more: Sequence[int | None] = [None] * len(parts)
    if alone and parts[0].source.weight is None:
        more = [length]
    elif weights:
        given, more = source_sizes(weights, length)
        length = sum(given)
    chains, sources = [], []
    for part, source, wanted in zip(parts, mix.sources, more, strict=True):
        chain, orders = _chain(maker, part, source, wanted)
        chains.append(chain)
        sources.append(replace(source, orders=orders))
    if not weights:
        left = [len(chain) - source.first for chain, source in zip(chains, sources, strict=True)]
        weights, length = [float(n) for n in left], min(length, sum(left))
    first = [source.first for source in sources]
    blend = BlendedDataset(chains, weights, length, maker.cache_dir(parts[0]), mix.start, first)
    return TrainingData(replace(mix, sources=tuple(sources)), blend, [chain.per_epoch for chain in chains], maker.scan)


def _readings(parts: Sequence[Part], alone: bool) -> list[Reading]:
    """Identify the sources by their contents; a source that is given twice counts as two."""
    readings: list[Reading] = []
    for part in parts:
        names = [reading.identity for reading in readings]
        identity, weight = part.identity, part.source.weight
        while identity in names:
            identity += "+"
        readings.append(Reading(part.source.prefix, identity, 1.0 if alone and weight is None else weight))
    return readings


def _chain(maker: Maker, part: Part, source: Reading, more: int | None) -> tuple[Chain, tuple[int | None, ...]]:
    """Keep the existing orders of a source, and add another one if they do not reach `more` samples further."""
    orders = source.orders or (more,)
    datasets = [maker.dataset(part, size, k) for k, size in enumerate(orders)]
    missing = source.first + (more or 0) - sum(map(len, datasets))
    if missing > 0:
        datasets.append(maker.dataset(part, missing, len(orders)))
        orders = (*orders, missing)
    return Chain(datasets), orders
