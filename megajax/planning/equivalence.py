"""Equivalence of all layouts: each trains a few steps on simulated devices and is compared with one device.

    config, _ = comparable(load_config("verify/gpt_tiny.yaml").config, devices=8)
    reference = train_layout(one_device(config), steps=5)
    for layout in every_layout(config, devices=8):
        print(layout_name(layout), compare(train_layout(layout, steps=5), reference))

Batches are random, the same under every layout. Their samples have unequal lengths, so that microbatches may differ in
the number of tokens in the loss.

Shapes: G global batch, S sequence, T decoder sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from megajax.config import Config, ParallelConfig
from megajax.config.parallel import fit_vocabulary
from megajax.data.dataset import Batch
from megajax.data.gpt import make_batch
from megajax.models.families import batch_arrays
from megajax.models.losses import coefficients, objective
from megajax.models.parameters import join_layers, named_leaves
from megajax.parallel.kernels import choose_attention
from megajax.parallel.mesh import build_mesh
from megajax.parallel.rules import Rules
from megajax.planning.collectives import Traffic, collectives
from megajax.planning.layouts import legal_layouts
from megajax.training.batches import Feed, batch_shardings
from megajax.training.schedule import Schedule
from megajax.training.step import build_init, build_train_step

EOD, DOCUMENT = 0, 16
"""End-of-document id, and mean length of a random document."""
PREDICTED = 0.2
"""Share of an encoder's tokens to be predicted."""


def random_batch(config: Config, step: int) -> Batch:
    """Return the random global batch of a step."""
    G = config.train.global_batch_size
    assert config.model.vocab_size is not None
    batch = RANDOM_BATCHES[config.model.family](config, step, G, config.model.vocab_size)
    return {**batch, "sample_ids": (step * G + np.arange(G)).astype(np.uint32)}


def random_samples(step: int, count: int, sequence: int, vocabulary: int) -> list[np.ndarray]:
    """Return `count` random samples [S + 1] of a step, each a row of documents."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, vocabulary, (count, sequence + 1))
    return list(np.where(rng.random(tokens.shape) < 1 / DOCUMENT, EOD, tokens).astype(np.int32))


def _gpt(config: Config, step: int, G: int, vocabulary: int) -> Batch:
    """Return a batch of samples of S / 2 to S + 1 tokens."""
    S = config.data.seq_length
    lengths = np.random.default_rng(step).integers(S // 2, S + 2, G)
    samples = random_samples(step, G, S, vocabulary)
    samples = [sample[:length] for sample, length in zip(samples, lengths, strict=True)]
    return make_batch(samples, np.arange(G), config.data, EOD)


def _bert(config: Config, step: int, G: int, vocabulary: int) -> Batch:
    """Return a batch of pairs of texts of S / 2 to S tokens together; the last sample is empty."""
    rng = np.random.default_rng(step)
    text, lengths = _text(rng, G, config.data.seq_length, vocabulary)
    places = np.arange(text.shape[1], dtype=np.int32)
    second = places >= rng.integers(1, lengths)[:, None]
    real = places < lengths[:, None]
    counts = real & (rng.random(text.shape) < PREDICTED)
    pair_labels = rng.integers(0, 2, G, dtype=np.int32)
    counts[-1], pair_labels[-1] = False, -1
    batch = {
        "tokens": np.where(counts, vocabulary - 1, text),
        "labels": text,
        "loss_mask": counts.astype(np.float32),
        "positions": np.broadcast_to(places, text.shape),
        "token_types": (second & real & (config.model.token_types > 1)).astype(np.int32),
        "segment_ids": (~real).astype(np.int32),
    }
    return {**batch, "pair_labels": pair_labels} if config.model.pair_task else batch


def _t5(config: Config, step: int, G: int, vocabulary: int) -> Batch:
    """Return a batch of texts of S / 2 to S tokens, and of T / 2 to T decoder tokens, which start one token later."""
    rng = np.random.default_rng(step)
    text, lengths = _text(rng, G, config.data.seq_length, vocabulary)
    target, target_lengths = _text(rng, G, config.data.decoder_seq_length, vocabulary)
    padding = np.arange(text.shape[1]) >= lengths[:, None]
    target_padding = np.arange(target.shape[1]) >= target_lengths[:, None]
    return {
        "tokens": text,
        "segment_ids": padding.astype(np.int32),
        "decoder_tokens": np.roll(target, 1, axis=1),
        "labels": target,
        "loss_mask": 1 - target_padding.astype(np.float32),
        "decoder_segment_ids": target_padding.astype(np.int32),
    }


def _text(rng: np.random.Generator, G: int, S: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids [G, S], and the number of real ones in each row [G], S / 2 to S."""
    return rng.integers(0, vocabulary, (G, S), dtype=np.int32), rng.integers(S // 2, S + 1, G)


RANDOM_BATCHES = {"gpt": _gpt, "bert": _bert, "t5": _t5}
"""Family -> function of a configuration, the step, G and the vocabulary that makes its batch without sample_ids."""

POLICIES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
GRADIENT_TOLERANCE = 1e-5
"""Allowed difference of gradients, relative to a tensor's largest entry, for sums in another order."""
LOSS_TOLERANCE = 5e-6
"""Allowed relative difference of the loss at every step."""
YARDSTICK = (
    f"initial parameters bit-equal; first-step gradients within {GRADIENT_TOLERANCE:g} of each tensor's largest entry; "
    f"losses within {LOSS_TOLERANCE:g} relative"
)
VOCABULARY = 256
"""Vocabulary size for a model whose vocabulary comes from a tokenizer."""


def comparable(config: Config, devices: int) -> tuple[Config, list[str]]:
    """Return the configuration, changed so that layouts differ only by rounding, and the changes.

    The vocabulary is padded as much as any layout of `devices` devices needs, so that all have the same tensors.
    """
    model, train = config.model, config.train
    changes = []
    if train.precision != "fp32":
        changes.append(f"train.precision {train.precision} -> fp32, in which layouts differ by rounding alone")
    if train.attention == "cudnn":
        changes.append("train.attention cudnn -> auto, as there is no GPU")
        train = replace(train, attention="auto")
    if model.vocab_size is None:
        changes.append(f"model.vocab_size unset -> {VOCABULARY}, as no tokenizer is read")
    model = replace(model, vocab_size=model.vocab_size or VOCABULARY)
    model = fit_vocabulary(model, ParallelConfig(tensor=devices))
    return replace(config, model=model, train=replace(train, precision="fp32")), changes


def one_device(config: Config) -> Config:
    """Return the reference layout: one device that takes the whole global batch at once."""
    train = replace(config.train, micro_batch_size=config.train.global_batch_size, attention="auto")
    return replace(config, parallel=ParallelConfig(data=1), train=train)


def every_layout(config: Config, devices: int) -> list[Config]:
    """List all legal layouts, with rematerialisation policies in turn."""
    policies = list(dict.fromkeys((config.train.remat, *POLICIES)))
    layouts = []
    for i, layout in enumerate(legal_layouts(config, devices)):
        # The policies shift by one in every round, so that layouts chosen at even distances cover all of them.
        policy = policies[(i + i // len(policies)) % len(policies)]
        layouts.append(replace(layout, train=replace(layout.train, remat=policy)))
    return layouts


class Compiled(NamedTuple):
    """The compiled program of a layout, with its initial state and input."""

    state: Any
    """Initial train state."""
    step: Any
    """Jitted train step, (state, batch) -> (state, metrics)."""
    feed: Feed
    rules: Rules


def compile_layout(config: Config) -> Compiled:
    """Compile and initialise a layout on the first devices; all of its sizes have to be numbers."""
    parallel, train = config.parallel, config.train
    mesh = build_mesh(parallel.sizes, jax.devices()[: prod(parallel.sizes.values())])
    rules = Rules.of(mesh, parallel, config.model)
    samples = train.samples or (train.steps or 1) * train.global_batch_size
    schedule = Schedule.from_config(config.optim, samples, train.global_batch_size)
    init, _, _ = build_init(config, rules)
    kernel = choose_attention(config, jax.default_backend(), batch_arrays(config.model, config.data))
    step = build_train_step(config, rules, schedule, kernel.name)
    feed = Feed(rules, train.micro_batch_size, batch_shardings(rules, config.model, config.data))
    return Compiled(init(jax.random.key(train.seed)), step, feed, rules)


@dataclass
class Outcome:
    """The results of a layout, on the host by name, and its traffic."""

    initial: dict[str, np.ndarray]
    """State before the first step."""
    traffic: Traffic
    """Collectives of one step."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Norm of the gradients of every step, before clipping."""
    first_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Gradients of the first step up to a constant factor, by the name of the moment from which they were read."""
    final: dict[str, np.ndarray] = field(default_factory=dict)
    """State after all steps."""


def train_layout(config: Config, steps: int) -> Outcome:
    """Train a layout for `steps` steps from the initial weights and return its outcome."""
    state, step, feed, rules = compile_layout(config)
    place = lambda number: feed.place(random_batch(config, number), config.train.global_batch_size)  # noqa: E731
    run = step.lower(state, place(0)).compile()
    outcome = Outcome(gathered(state), collectives(run, rules.mesh))
    terms = coefficients(config.model)
    for number in range(steps):
        state, metrics = run(state, place(number))
        outcome.losses.append(
            float(objective({name: metrics[name] for name in terms if name in metrics}, config.model))
        )
        outcome.norms.append(float(metrics["grad-norm"]))
        if number == 0:
            outcome.first_gradients = unclipped_gradients(gathered(state), outcome.norms[0], config.optim.clip_grad)
    outcome.final = gathered(state)
    return outcome


def gathered(tree: Any) -> dict[str, np.ndarray]:
    """Return every array of a state by name, on the host, with layers stacked as in a checkpoint."""
    return {name: np.asarray(leaf[...]) for name, leaf in named_leaves(join_layers(jax.device_get(tree)))}


def unclipped_gradients(state: dict[str, np.ndarray], norm: float, clip_grad: float) -> dict[str, np.ndarray]:
    """Return the gradients of a first step up to a constant factor, from the momentum that every optimizer keeps.

    Clipping is undone, because its norm would spread one wrong gradient to all others.
    """
    factor = np.float32(max(1.0, norm / clip_grad) if clip_grad else 1.0)
    return {name: value * factor for name, value in state.items() if ".mu." in name or ".trace." in name}


@dataclass(frozen=True)
class Difference:
    """Measure the distances of a layout from the reference; nan counts as too far."""

    initial: float
    """Largest difference of any tensor of the initial state, relative to that tensor's largest entry."""
    gradients: float
    """Largest difference of any gradient of the first step, relative to that tensor's largest entry."""
    losses: float
    """Largest relative difference of the loss at any step."""
    departures: tuple[str, ...]
    """Results outside the tolerances in words, with tensors in the order of the model."""


def compare(outcome: Outcome, reference: Outcome) -> Difference:
    """Return the differences of a layout from the reference."""
    initial = differences(outcome.initial, reference.initial)
    gradients = differences(outcome.first_gradients, reference.first_gradients)
    relative = np.abs(np.divide(outcome.losses, reference.losses) - 1)
    losses = {str(step): float(far) for step, far in enumerate(relative, 1)}
    return Difference(
        initial=_largest(initial),
        gradients=_largest(gradients),
        losses=_largest(losses),
        departures=(
            *_beyond(0, "initial", initial),
            *_beyond(GRADIENT_TOLERANCE, "gradient of", gradients),
            *_beyond(LOSS_TOLERANCE, "loss of step", losses),
        ),
    )


def differences(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest difference of every tensor of `b`, relative to that tensor's largest entry."""
    return {name: float(np.abs(a[name] - b[name]).max() / max(np.abs(b[name]).max(), 1e-30)) for name in b}


def _largest(far: dict[str, float]) -> float:
    return float(np.max(list(far.values())))


def _beyond(tolerance: float, what: str, far: dict[str, float]) -> list[str]:
    parameter = lambda name: name.rpartition(".mu.")[2].rpartition(".trace.")[2].removeprefix("params.")  # noqa: E731
    return [f"{what} {parameter(name)}" for name, difference in far.items() if not difference <= tolerance]
