"""A few words from the model when training ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from megajax.config.base import ConfigError
from megajax.config.config import Config
from megajax.data.tokenizers import Tokenizer
from megajax.models.decode import generate
from megajax.models.gpt import Gpt
from megajax.models.parameters import join_layers
from megajax.models.sampling import Sampling

SAMPLING = Sampling(temperature=0.8, top_p=0.95)


def encode_prompt(config: Config, tokenizer: Tokenizer) -> list[int]:
    """Ids of `log.sample_prompt`; none without one. Call it before training, to fail early.

    Raises:
        ConfigError: the prompt leaves no room for a continuation, or the tokenizer cannot encode it.
    """
    ids = tokenizer.encode(config.log.sample_prompt or "")
    if len(ids) >= config.model.max_positions:
        raise ConfigError(
            f"log.sample_prompt has {len(ids)} tokens, model.max_positions is {config.model.max_positions}: shorten it"
        )
    return ids


def print_sample(config: Config, params: Gpt, tokenizer: Tokenizer) -> None:
    """Continue `log.sample_prompt`, if there is one, on one device."""
    ids = encode_prompt(config, tokenizer)
    if not ids or jax.process_count() > 1:
        return
    model = jax.device_put(join_layers(params), jax.local_devices()[0])
    room = config.model.max_positions - len(ids)
    out = generate(
        model, jnp.array([ids]), jnp.array([len(ids)]), jnp.uint32(config.train.seed),
        new_tokens=min(config.log.sample_tokens, room), sampling=SAMPLING, end_ids=(tokenizer.eod_id,),
    )  # fmt: skip
    text = tokenizer.decode([*ids, *out.tokens[0, : int(out.lengths[0])].tolist()])
    print(f"sample at temperature {SAMPLING.temperature}, top-p {SAMPLING.top_p}:\n{text}")
