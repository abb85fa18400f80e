"""`python -m megajax.generate RUN_DIR --prompt "..."`: let a trained model continue text.

Nothing in the run's directory is written, and of a checkpoint only the weights are read, onto one device and in the
precision that the run was trained in. A prompt becomes ids exactly as the training text did: no token is put before it.

Shapes: B prompts, P ids of the longest prompt.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from megajax.checkpoint.store import Checkpoints
from megajax.config import ConfigError, TokenizerConfig
from megajax.config.cli import OneLineParser, entry_point
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.models.decode import generate
from megajax.models.gpt import Gpt
from megajax.models.parameters import cast
from megajax.models.sampling import Sampling
from megajax.training.run_directory import RunDirectory
from megajax.training.setup import check_tokenizer
from megajax.training.step import DTYPES

log = logging.getLogger(__name__)


class Continuation(NamedTuple):
    """What a model made of one prompt."""

    prompt: str
    text: str
    """What follows the prompt."""
    tokens: int
    """New tokens, the end of the document included."""
    finish_reason: Literal["stop", "length"]
    """Whether the model ended the document or ran out of room."""


class TrainedModel(NamedTuple):
    """A model on one device and the tokenizer it was trained with."""

    model: Gpt
    tokenizer: Tokenizer


@entry_point
def main(argv: list[str]) -> None:
    """Continuations go to stdout, everything said about them to stderr."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", force=True)
    args = _parser().parse_args(argv)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    for result in generate_text(
        args.run_dir, args.prompt, tokens=args.tokens, sampling=sampling, seed=args.seed, step=args.step
    ):
        log.info("%r + %d tokens (%s)", result.prompt[:30], result.tokens, result.finish_reason)
        print(result.text, flush=True)


def generate_text(
    run_dir: str | Path,
    prompts: Sequence[str],
    *,
    tokens: int = 64,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    seed: int = 0,
    step: int | None = None,
) -> list[Continuation]:
    """Continue prompts with the model of a run; see `load_model` and `continue_prompts` to load it only once."""
    return continue_prompts(*load_model(run_dir, step), prompts, tokens=tokens, sampling=sampling, seed=seed)


def load_model(run_dir: str | Path, step: int | None = None) -> TrainedModel:
    """Read the weights of a run, finished or not.

    Args:
        run_dir: `output_dir` of the training.
        step: of the checkpoint; None for the newest.

    Raises:
        ConfigError: there is no such run, checkpoint or tokenizer.
    """
    run, config = RunDirectory.open(run_dir)
    tokenizer = build_tokenizer(_tokenizer_of(run, config.tokenizer))
    shape = replace(config.model, vocab_size=config.model.vocab_size or tokenizer.vocab_size)
    dtype = DTYPES[config.train.precision]
    like = jax.eval_shape(lambda: cast(Gpt(jax.random.key(0), shape), dtype))
    device = SingleDeviceSharding(jax.local_devices()[0])
    with Checkpoints(run.checkpoints(config.checkpoint), None) as checkpoints:
        if checkpoints.latest is None:
            raise ConfigError(f"{run.path} has no finished checkpoint: train it first")
        model, record = checkpoints.restore(like, jax.tree.map(lambda _: device, like), step, part="params")
    check_tokenizer(tokenizer, record, run)
    log.info("%s: weights of step %d", run.path, record["step"])
    return TrainedModel(model, tokenizer)


def _tokenizer_of(run: RunDirectory, config: TokenizerConfig) -> TokenizerConfig:
    if config.type == "sentencepiece" and config.model is None:
        return replace(config, model=str(run.path / "tokenizer.model"))
    return config


def continue_prompts(
    model: Gpt, tokenizer: Tokenizer, prompts: Sequence[str], *, tokens: int, sampling: Sampling, seed: int
) -> list[Continuation]:
    """Continue prompts together; prompt i draws from (seed, i) and is not changed by the others.

    Args:
        model: on one device.
        tokenizer: its end-of-document id ends a continuation.
        prompts: at least one token each.
        tokens: new tokens at most; fewer where a prompt leaves the model less room.
        sampling: how a token is chosen.
        seed: 0 to 2^32 - 1.

    Raises:
        ConfigError: a prompt is empty or too long, or a number is out of its range.
    """
    if not prompts or isinstance(prompts, str):
        raise ConfigError("prompts: expected a list of at least one text")
    if tokens < 1:
        raise ConfigError(f"tokens is {tokens}: expected 1 or more")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed is {seed}: expected 0 to {2**32 - 1}")
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    rooms = [_room(prompt, ids, tokens, model) for prompt, ids in zip(prompts, encoded, strict=True)]
    lengths = np.array([len(ids) for ids in encoded])
    padded = np.zeros((len(encoded), lengths.max()), np.int32)
    for row, ids in zip(padded, encoded, strict=True):
        row[: len(ids)] = ids
    # Rows run as long as the one with most room; what others make past the last position is cut off below.
    out = generate(
        model, jnp.array(padded), jnp.array(lengths), jnp.uint32(seed),
        new_tokens=max(rooms), sampling=sampling, end_ids=(tokenizer.eod_id,),
    )  # fmt: skip
    made = zip(prompts, encoded, np.array(out.tokens), np.minimum(out.lengths, rooms), strict=True)
    return [_continuation(tokenizer, prompt, ids, new[:count].tolist()) for prompt, ids, new, count in made]


def _room(prompt: str, ids: list[int], tokens: int, model: Gpt) -> int:
    """How many tokens may follow a prompt."""
    room = model.config.max_positions - len(ids)
    if not ids:
        raise ConfigError(f"the prompt {prompt!r} is empty: give at least one token")
    if room < 1:
        raise ConfigError(
            f"the prompt {prompt[:30]!r}... has {len(ids)} tokens, which leaves no room for new ones: "
            f"the model sees {model.config.max_positions} (model.max_positions)"
        )
    log.info("%r has %d ids, from %s on", prompt[:30], len(ids), ids[:8])
    if room < tokens:
        log.warning("%r leaves room for %d new tokens, not %d (model.max_positions)", prompt[:30], room, tokens)
    return min(tokens, room)


def _continuation(tokenizer: Tokenizer, prompt: str, ids: list[int], new: list[int]) -> Continuation:
    stopped = new[-1] == tokenizer.eod_id
    # Decoded behind its prompt: some tokenizers drop a space at the beginning of what they decode.
    text = tokenizer.decode([*ids, *(new[:-1] if stopped else new)])[len(tokenizer.decode(ids)) :]
    return Continuation(prompt, text, len(new), "stop" if stopped else "length")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m megajax.generate",
        description="Let a trained model continue text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="output_dir of the training")
    add("--prompt", action="append", required=True, metavar="TEXT", help="text to continue; may be given again")
    add("--tokens", type=int, default=64, metavar="N", help="new tokens at most")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0 = from all")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest tokens of total probability P")
    add("--seed", type=int, default=0, help="of the draws")
    add("--step", type=int, metavar="N", help="checkpoint; unset = the newest")
    return parser


if __name__ == "__main__":
    sys.exit(main())
