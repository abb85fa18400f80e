"""The search is complete and ranked, and gives a reason for every loser."""

import time
from dataclasses import replace

import pytest

from megajax.config import Config, DataConfig, InputError, ModelConfig, ParallelConfig, TrainConfig, load_config
from megajax.config.parallel import AXES, fit_vocabulary
from megajax.costs.hardware import gpu_named
from megajax.planning.layouts import layout_name, legal_layouts
from megajax.planning.roofline import step_time
from megajax.planning.search import MICRO_BATCHES, search_layouts

H100 = gpu_named("H100")
MODEL = ModelConfig(num_layers=8, hidden_size=1024, num_heads=8, vocab_size=50_257, max_positions=1024)
SMALL = Config(
    model=MODEL,
    data=DataConfig(seq_length=1024),
    train=TrainConfig(global_batch_size=32, precision="bf16"),
)


def sizes(config: Config) -> tuple[int, ...]:
    return (*(getattr(config.parallel, axis) for axis in AXES), config.parallel.chunks, config.parallel.zero)


def test_every_legal_layout_is_tried_once() -> None:
    found = [sizes(candidate.config) for candidate in search_layouts(SMALL, H100, 8)]
    assert len(found) == len(set(found))
    legal = {
        sizes(layout)
        for micro in MICRO_BATCHES
        for layout in legal_layouts(replace(SMALL, train=replace(SMALL.train, micro_batch_size=micro)), 8)
    }
    assert set(found) == legal


def test_ranked_by_time_with_reasons() -> None:
    ranking = search_layouts(SMALL, H100, 8)
    seconds = [candidate.time.seconds for candidate in ranking if candidate.time]
    assert seconds == sorted(seconds)
    assert ranking[0].verdict == "fastest"
    assert all(" % slower: " in candidate.verdict for candidate in ranking[1:] if candidate.time)
    assert (ranking[0].mesh["pipe"], ranking[0].mesh["tensor"]) == (1, 1)  # a small model wants replicas


def test_what_does_not_fit_comes_last() -> None:
    small_gpu = replace(H100, memory_bytes=750e6)
    ranking = search_layouts(SMALL, small_gpu, 8)
    fits = [candidate.time is not None for candidate in ranking]
    assert fits == sorted(fits, reverse=True)
    assert 0 < sum(fits) < len(fits)
    assert all(candidate.memory <= 0.92 * 750e6 for candidate in ranking if candidate.time)
    nowhere = search_layouts(SMALL, replace(H100, memory_bytes=1e6), 8)
    assert all(candidate.verdict.startswith("does not fit: ") for candidate in nowhere)
    assert nowhere[0].verdict.endswith(" of 0 GiB")
    assert [c.memory for c in nowhere] == sorted(c.memory for c in nowhere)


def test_tensor_stays_in_a_node_unless_asked() -> None:
    wide = replace(SMALL, model=replace(MODEL, num_heads=16))
    inside = {candidate.mesh["tensor"] for candidate in search_layouts(wide, H100, 16)}
    across = {candidate.mesh["tensor"] for candidate in search_layouts(wide, H100, 16, tensor_across_nodes=True)}
    assert (inside, across) == ({1, 2, 4, 8}, {1, 2, 4, 8, 16})


def test_no_layout() -> None:
    with pytest.raises(InputError, match=r"no layout of 7 GPUs divides .*global_batch_size 32: change the batch"):
        search_layouts(SMALL, H100, 7)


@pytest.mark.slow
def test_175b_on_1024_h100s_in_seconds() -> None:
    """At least as fast as Megatron-LM's layouts of that size: 8 x 16 (its README), 4 x 8 in 12 chunks (NeMo)."""
    words = ["train.precision=bf16", "parallel.data=1", "train.global_batch_size=1536"]
    config = load_config("models/megatron_175b.yaml", words).config
    start = time.process_time()
    ranking = search_layouts(config, H100, 1024)
    assert time.process_time() - start < 20
    best = ranking[0]
    assert best.time is not None
    for tensor, pipe, chunks in ((8, 16, 1), (4, 8, 12)):
        parallel = ParallelConfig(pipe=pipe, data=1024 // pipe // tensor, tensor=tensor, chunks=chunks, zero=1)
        published = replace(config, model=fit_vocabulary(config.model, parallel), parallel=parallel)
        mesh = {axis: getattr(parallel, axis) for axis in AXES}
        assert best.time.seconds <= step_time(published, mesh, H100).seconds
        assert any(sizes(candidate.config) == sizes(published) for candidate in ranking)
    print(f"{len(ranking)} layouts, best {layout_name(best.config)}: {best.time.seconds:.2f} s")
