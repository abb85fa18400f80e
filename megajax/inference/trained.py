"""The trained model of a run, as generation, evaluation and conversion load it.

Nothing is written in the run's directory. Only the weights of a checkpoint are read, straight to their places on the
mesh. The layout of the training does not matter: unless `parallel.*` words ask for another, the model is on one device.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.checkpoint.store import Checkpoints
from megajax.config import Config, InputError, ModelConfig, ParallelConfig, load_config, resolve_mesh
from megajax.config.parallel import AXES, fit_vocabulary
from megajax.corpus.chat import Chat, Message
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.data.tokenizers.tokenizer import check_text
from megajax.models.families import FAMILIES, build_model, model_class
from megajax.models.layout import Layout
from megajax.models.model import Model
from megajax.models.parameters import cast
from megajax.parallel.mesh import build_mesh, simulate_devices
from megajax.parallel.partitioned import Partitioned
from megajax.parallel.rules import Rules
from megajax.training.run_directory import RunDirectory
from megajax.training.setup import check_tokenizer
from megajax.training.step import DTYPES

log = logging.getLogger(__name__)

CHOICES = ("parallel.", "train.precision", "data.seq_length")
"""Keys whose values may differ from those in training."""


class Prompt(NamedTuple):
    """A prompt that is given by its token ids, besides its text."""

    text: str
    """Text of the prompt, for people."""
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TrainedModel:
    """A model with its layout, its tokenizer and the configuration of its training."""

    model: Any
    """Weights, a `Model`, in the precision that the run was trained in."""
    tokenizer: Tokenizer
    config: Config
    """Configuration of the run, with `layout`'s sizes in `parallel`."""
    layout: Layout = field(default_factory=Layout)
    replicas: int = 1
    """Number of parts into which the rows of a batch are cut, which must divide the number of rows."""
    end_ids: tuple[int, ...] = ()
    """Tokens, each of which ends a text."""
    prefix: tuple[int, ...] = ()
    """Tokens with which texts began in training: a beginning-of-sequence token, or none."""
    suffix: tuple[int, ...] = ()
    """Tokens with which texts for an encoder ended in training: an end token, or none."""
    first_token: int = 0
    """Token that the decoder of an encoder-decoder model begins with."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as in training; a beginning-of-sequence token spelled out in it is not doubled."""
        if self.prefix and (spelled := self.tokenizer.decode(self.prefix)):
            text = text.removeprefix(spelled)
        return [*self.prefix, *self.tokenizer.encode(text), *self.suffix]

    def marked(self, text: str) -> Prompt:
        """Encode a prompt in which names of special tokens stand for these tokens; its beginning is not doubled.

        Raises:
            InputError: the prompt is not valid text.
        """
        check_text(text, "the prompt")
        ids = self.tokenizer.encode_marked(text)
        there = tuple(ids[: len(self.prefix)]) == self.prefix
        return Prompt(text, (*(() if there else self.prefix), *ids, *self.suffix))

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """Return the prompt for the assistant's next answer, with the ids that preceded it in training (`corpus.chat`).

        Raises:
            InputError: a message has no role or text, or the chat template cannot write it.
        """
        said = next((message["content"] for message in reversed(messages) if message.get("role") == "user"), "")
        return Prompt(said, tuple(self._chat.prompt(messages)))

    def for_chat(self) -> TrainedModel:
        """Return the same model with the token that ends answers in chats among its end tokens."""
        end = self._chat.end_id
        return self if end is None else replace(self, end_ids=tuple(dict.fromkeys([*self.end_ids, end])))

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self.tokenizer)

    def check_ids(self, ids: Sequence[int] | np.ndarray, text: str) -> None:
        """Refuse a text with ids for which the model has no row, as a tokenizer may have more ids than the model.

        Raises:
            InputError: there is such an id; the message names the first.
        """
        size = self.config.model.vocab_size
        lacking = next((int(i) for i in ids if size is not None and i >= size), None)
        if lacking is not None:
            raise InputError(
                f"{text[:30]!r} has the token {self.tokenizer.decode([lacking])!r} ({lacking}), and the model knows "
                f"{size} (model.vocab_size): its tokenizer has {self.tokenizer.vocab_size}; leave that token out"
            )

    def with_bos(self, wanted: bool) -> TrainedModel:
        """Return the same model with or without a beginning-of-sequence token before its texts.

        Raises:
            InputError: the tokenizer has no such token.
        """
        bos = self.tokenizer.bos_id
        if not wanted:
            return replace(self, prefix=())
        if bos is None:
            raise InputError("the tokenizer of this run has no beginning-of-sequence token to put before a text")
        return replace(self, prefix=(bos,))


def load_model(
    run_dir: str | Path,
    step: int | None = None,
    words: Sequence[str] = (),
    purpose: str = "this",
    writes: Sequence[str] = (),
) -> TrainedModel:
    """Read the weights of a run, which may be trained here, still training, or imported.

    Args:
        run_dir: `output_dir` of the training.
        step: step of the checkpoint; None for the newest.
        words: `KEY=VALUE` settings that may differ from training (`CHOICES`), such as `parallel.tensor=2`.
        purpose: use of the model in words, for messages.
        writes: kinds of text that the model may generate (`Model.writes`); any if empty.

    Raises:
        InputError: the run, checkpoint or tokenizer does not exist, the mesh does not fit model or devices, or the
            model is of another family.
    """
    run, config = open_run(run_dir, words)
    if writes and model_class(config.model).writes not in writes:
        wanted = " or ".join(name for name, family in FAMILIES.items() if family.writes in writes)
        raise InputError(f"{purpose} takes a {wanted} model, and that of {run.path} is a {config.model.family}")
    rules = replace(Rules.of(_mesh(config.parallel), config.parallel, config.model), sequence_parallel=False)
    layout = Partitioned(rules)
    tokenizer = build_tokenizer(config.tokenizer)
    shape = replace(config.model, vocab_size=config.model.vocab_size or tokenizer.vocab_size)
    config = replace(config, model=fit_vocabulary(shape, config.parallel))
    if config.data.seq_length > shape.max_positions:
        raise InputError(f"data.seq_length is {config.data.seq_length}: the model sees {shape.max_positions}")
    like = abstract_model(config.model, config.train.precision)
    with Checkpoints(run.checkpoints(config.checkpoint), None, run.owner) as checkpoints:
        if checkpoints.latest is None:
            raise InputError(f"{run.path} has no finished checkpoint: train it first")
        model, record = checkpoints.restore(like, rules.shardings(like), step, part="params")
    check_tokenizer(tokenizer, record, run)
    log.info("%s: weights of step %d", run.path, record["step"])
    return TrainedModel(
        model, tokenizer, config, layout, layout.replicas,
        end_ids=_end_ids(run, tokenizer),
        prefix=tokenizer.prefix,
        suffix=tokenizer.suffix if model_class(config.model).writes == "answer" else (),
        first_token=_first_token(run, tokenizer),
    )  # fmt: skip


def open_run(run_dir: str | Path, words: Sequence[str] = ()) -> tuple[RunDirectory, Config]:
    """Return a run and its configuration for use on one device, or with the layout that `words` of `CHOICES` set.

    Raises:
        InputError: the run does not exist, or a word sets a value that training has fixed.
    """
    for word in words:
        if not word.startswith(CHOICES):
            raise InputError(f"{word}: settled by the training; what may be given here is {', '.join(CHOICES)}...")
    run, config = RunDirectory.open(run_dir, [word for word in words if not word.startswith("parallel.")])
    layout = [word for word in words if word.startswith("parallel.")]
    return run, replace(config, parallel=load_config(None, ["parallel.data=1", *layout]).config.parallel)


def abstract_model(model: ModelConfig, precision: str) -> Model:
    """Return the abstract arrays of a model in the precision in which it computes."""
    return jax.eval_shape(lambda: cast(build_model(jax.random.key(0), model), DTYPES[precision]))


def _mesh(parallel: ParallelConfig) -> Mesh:
    """Build a mesh of the first devices, as many as the layout needs."""
    nothing = ParallelConfig()
    for key in ("pipe", "context", "chunks", "zero"):
        if getattr(parallel, key) != getattr(nothing, key):
            raise InputError(f"parallel.{key} is for training: use parallel.data, fsdp, expert and tensor here")
    if parallel.simulate_devices:
        simulate_devices(parallel.simulate_devices)
    there = jax.device_count()
    wanted = there if parallel.data == "auto" else math.prod(getattr(parallel, axis) for axis in AXES)
    count = min(wanted, there)
    return build_mesh(resolve_mesh(parallel, count), jax.devices()[:count])


def _end_ids(run: RunDirectory, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokenizer's end of document, and the end tokens that an imported model names."""
    for name in ("generation_config.json", "config.json"):
        ids = _imported(run, name).get("eos_token_id")
        if ids is not None:
            return tuple(dict.fromkeys([tokenizer.eod_id, *(ids if isinstance(ids, list) else [ids])]))
    return (tokenizer.eod_id,)


def _first_token(run: RunDirectory, tokenizer: Tokenizer) -> int:
    """Return the decoder's first token, from config.json or else as in training (see `data.t5`)."""
    named = _imported(run, "config.json").get("decoder_start_token_id")
    return next((i for i in (named, tokenizer.start_id) if i is not None), 0)


def _imported(run: RunDirectory, name: str) -> dict[str, Any]:
    path = run.huggingface / name
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from None
