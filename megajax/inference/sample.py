"""Continuation of prompts by a model, batch by batch.

Shapes: B rows of a batch, P ids of the longest prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import numpy as np

from megajax.config.base import InputError
from megajax.config.config import Config, LogConfig
from megajax.config.model import ModelConfig
from megajax.data.tokenizers import Tokenizer
from megajax.data.tokenizers.tokenizer import check_text
from megajax.inference.decode import Generation, advance, begin
from megajax.inference.sampling import Sampling
from megajax.inference.trained import Prompt, TrainedModel
from megajax.models.families import model_class
from megajax.models.model import Model
from megajax.models.parameters import join_layers
from megajax.processes import in_turn

log = logging.getLogger(__name__)

LOOK_EVERY = 16
"""Number of new tokens between two searches for stop strings."""
WIDTH = 16
"""Prompts are padded to a multiple of this length, so that few shapes are compiled."""


@dataclass(frozen=True)
class Options:
    """Choose how prompts are continued.

    Raises:
        InputError: a number is out of its range.
    """

    tokens: int = 64
    """Largest number of new tokens; there are fewer where a prompt leaves less room.

    It may be 0 with `score_prompts` alone.
    """
    sampling: Sampling = field(default_factory=Sampling)
    """Settings with which a token is chosen."""
    seed: int = 0
    """Seed of the sampling, 0 to 2^32 - 1; prompt i draws from (seed, i)."""
    stop: tuple[str, ...] = ()
    """Texts at whose first appearance a continuation ends, whatever tokens they consist of."""
    score_prompts: bool = False
    """Whether to return the log-probabilities of the prompts' own tokens as well."""
    batch_size: int = 32
    """Number of prompts that run together."""
    cut_prompts: bool = False
    """Whether to cut off the beginning of a prompt that leaves no room for all `tokens`, instead of making fewer."""

    def __post_init__(self) -> None:
        """Refuse values out of their range."""
        if self.tokens < (0 if self.score_prompts else 1):
            raise InputError(f"tokens is {self.tokens}: expected 1 or more")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed is {self.seed}: expected 0 to {2**32 - 1}")
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}: expected 1 or more")
        if not all(self.stop):
            raise InputError("a stop string is empty: it would stop everything")


class Continuation(NamedTuple):
    """The continuation of one prompt by a model."""

    prompt: str
    text: str
    """Text that follows the prompt, up to a stop string."""
    finish_reason: Literal["stop", "length"]
    """Reason of the end: "stop" for an end token or a stop string, "length" where the room ran out."""
    ids: tuple[int, ...]
    """New tokens up to the end token, or up to the token that completes a stop string."""
    log_probabilities: tuple[float, ...]
    """Log-probability of each new token, in nats, under the model itself: before temperature and filters."""
    prompt_ids: tuple[int, ...]
    prompt_log_probabilities: tuple[float, ...]
    """Log-probability of every token of the prompt but the first, if asked for."""

    @property
    def tokens(self) -> int:
        """Return the number of new tokens."""
        return len(self.ids)


def continue_prompts(
    trained: TrainedModel, prompts: Sequence[str | Prompt], options: Options
) -> Iterator[Continuation]:
    """Continue prompts in batches; a prompt's continuation does not depend on the others.

    Args:
        trained: model and tokenizer.
        prompts: texts, or ids with their texts, at least one token each; all are checked before the first is continued.
        options: choices of how prompts are continued.

    Raises:
        InputError: a prompt is empty or too long, or has no log-probabilities.
    """
    if not prompts or isinstance(prompts, str):
        raise InputError("prompts: expected a list of at least one text")
    if options.score_prompts and model_class(trained.config.model).writes != "continuation":
        raise InputError("a prompt that an encoder reads has no log-probabilities: leave --echo or --logprobs out")
    rows = [_Row(number, prompt, trained, options) for number, prompt in enumerate(prompts)]
    return (
        continuation
        for first in range(0, len(rows), options.batch_size)
        for continuation in _continue_batch(trained, rows[first : first + options.batch_size], options)
    )


def _continue_batch(trained: TrainedModel, rows: list[_Row], options: Options) -> Iterator[Continuation]:
    state = in_turn(_begin(trained, rows, options))
    room = state.tokens.shape[1]  # room of the row that has the most; other rows drop what exceeds theirs
    looks = range(LOOK_EVERY, room, LOOK_EVERY) if options.stop else ()
    for until in (*looks, *([room] if room else [])):
        state = in_turn(
            advance(
                trained.model, state, until,
                sampling=options.sampling, end_ids=trained.end_ids, layout=trained.layout,
            )
        )  # fmt: skip
        tokens, lengths = jax.device_get((state.tokens, state.lengths))
        for i, row in enumerate(rows):
            row.look(tokens[i, : lengths[i]].tolist())
        stopped = np.array([*[row.finished is not None for row in rows], *[True] * (len(tokens) - len(rows))])
        if stopped.all():
            break
        state = state._replace(stopped=jax.device_put(stopped, state.stopped.sharding))
    new, old = jax.device_get((state.log_probabilities, state.prompt_log_probabilities))
    for i, row in enumerate(rows):
        yield row.continuation(new[i].tolist(), old[i].tolist())


def _begin(trained: TrainedModel, rows: Sequence[_Row], options: Options) -> Generation:
    """Read the prompts of a batch, filled up with its last row to a multiple of the replicas."""
    filled = [*rows, *[rows[-1]] * (-len(rows) % trained.replicas)]
    lengths = np.array([len(row.prompt_ids) for row in filled])
    width = -(-lengths.max() // WIDTH) * WIDTH
    prompts = np.zeros((len(filled), width), np.int32)
    for line, row in zip(prompts, filled, strict=True):
        line[: len(row.prompt_ids)] = row.prompt_ids
    return begin(
        trained.model, prompts, lengths, np.uint32(options.seed),
        new_tokens=max(row.room for row in rows), rows=np.array([row.number for row in filled]),
        layout=trained.layout, score_prompts=options.score_prompts, first_token=trained.first_token,
    )  # fmt: skip


class _Row:
    """Follow one prompt of a batch while its continuation is generated."""

    def __init__(self, number: int, prompt: str | Prompt, trained: TrainedModel, options: Options) -> None:
        if isinstance(prompt, str):
            check_text(prompt, "the prompt")
            prompt = Prompt(prompt, tuple(trained.encode(prompt)))
        self.number, self.prompt, self.stop = number, prompt.text, options.stop
        self.tokenizer, self.end_ids = trained.tokenizer, trained.end_ids
        positions = trained.config.model.max_positions
        self.prompt_ids = list(prompt.ids)
        trained.check_ids(self.prompt_ids, prompt.text)
        self.encoded = model_class(trained.config.model).writes == "answer"
        if options.cut_prompts:
            self.prompt_ids = self.prompt_ids[-max(1, positions - options.tokens) :]
        self.room = self._room(options.tokens, positions)
        self.ids: list[int] = []
        self.text = ""
        self.finished: Literal["stop", "length"] | None = None

    def _room(self, tokens: int, positions: int) -> int:
        """Return the number of tokens that may follow the prompt."""
        ids, start = self.prompt_ids, self.prompt[:30]
        room = tokens if self.encoded else positions - len(ids)  # with an encoder, positions are unlimited distances
        if not ids:
            raise InputError(f"the prompt {self.prompt!r} is empty: give at least one token")
        if room < min(tokens, 1):
            raise InputError(
                f"the prompt {start!r}... has {len(ids)} tokens, which leaves no room for new ones: "
                f"the model sees {positions} (model.max_positions)"
            )
        if room < tokens:
            log.warning("%r leaves room for %d new tokens, not %d (model.max_positions)", start, room, tokens)
        return min(tokens, room)

    def look(self, ids: list[int]) -> None:
        """Read all new tokens so far, and finish the row at an end token, at a stop string or where its room ends."""
        if self.finished:
            return
        seen, self.ids = len(self.ids), ids[: self.room]
        ended = self.ids[-1] in self.end_ids
        text = self._text(self.ids[:-1] if ended else self.ids)
        self.text = self._before_stop(text)
        if self.text != text:
            # A stop string may end within a token: keep the tokens up to the one that completes it.
            texts = {count: self._text(self.ids[:count]) for count in range(seen + 1, len(self.ids))}
            self.ids = self.ids[: next((n for n in texts if self._before_stop(texts[n]) != texts[n]), len(self.ids))]
        if ended or self.text != text:
            self.finished = "stop"
        elif len(self.ids) == self.room:
            self.finished = "length"

    def _text(self, ids: list[int]) -> str:
        if self.encoded:
            return self.tokenizer.decode(ids)
        # The text is decoded together with its prompt, because some tokenizers drop a space at the beginning.
        decode = self.tokenizer.decode
        return decode([*self.prompt_ids, *ids])[len(decode(self.prompt_ids)) :]

    def _before_stop(self, text: str) -> str:
        return text[: min((at for stop in self.stop if (at := text.find(stop)) >= 0), default=len(text))]

    def continuation(self, new: list[float], old: list[float]) -> Continuation:
        """Return the continuation with the log-probabilities of its new tokens and of the prompt's tokens."""
        count, prompt = len(self.ids), self.prompt_ids
        return Continuation(
            self.prompt, self.text, self.finished or "length", tuple(self.ids), tuple(new[:count]),
            tuple(prompt), tuple(old[: len(prompt) - 1]),
        )  # fmt: skip


def encode_prompt(log: LogConfig, model: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of `log.sample_prompt`, or none without one.

    This is called before training, to fail early.

    Raises:
        InputError: the prompt leaves no room for a continuation, the tokenizer cannot encode it, or the model does not
            continue text.
    """
    check_text(log.sample_prompt or "", "log.sample_prompt")
    ids = [*tokenizer.prefix, *tokenizer.encode(log.sample_prompt)] if log.sample_prompt else []
    if ids and model_class(model).writes != "continuation":
        raise InputError(f"log.sample_prompt: a {model.family} does not continue text: unset it")
    if len(ids) >= model.max_positions:
        raise InputError(
            f"log.sample_prompt has {len(ids)} tokens, model.max_positions is {model.max_positions}: shorten it"
        )
    return ids


def print_sample(config: Config, params: Model, tokenizer: Tokenizer) -> None:
    """Continue `log.sample_prompt`, if there is one, on one device, and print it when training ends."""
    if not encode_prompt(config.log, config.model, tokenizer) or jax.process_count() > 1:
        return
    model = jax.device_put(join_layers(params), jax.local_devices()[0])
    trained = TrainedModel(model, tokenizer, config, end_ids=(tokenizer.eod_id,), prefix=tokenizer.prefix)
    sampling = Sampling(temperature=0.8, top_p=0.95)
    options = Options(tokens=config.log.sample_tokens, sampling=sampling, seed=config.train.seed)
    [made] = continue_prompts(trained, [config.log.sample_prompt or ""], options)
    print(f"sample at temperature {sampling.temperature}, top-p {sampling.top_p}:\n{made.prompt}{made.text}")
