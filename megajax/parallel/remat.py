"""Rematerialisation: a policy is the set of names of the activations kept for the backward pass (2205.05198 §5).

Blocks tag the activations that are worth keeping (`jax.ad_checkpoint.checkpoint_name`); everything else is computed
again. Weights that were gathered or reshaped for a layer are never kept, because they can be made again from the
weights at rest. A layer keeps, per microbatch in 16-bit elements, with s sequence, b batch, h embed, t tensor (sequence
parallel, GELU MLP of 4 h):

    none        all that the backward pass needs, scores of the attention included with the xla kernel
    selective   all that is tagged: (2 + 2 + 6 + 2 + 8) s b h / t = 20 s b h / t bytes (Megatron: 34)
                (norms after the sums: the second sum as well, 22; norms of the branches: what both branches put
                out as well, 24)
    full        2 s b h / t bytes, the block input
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from megajax.config.train import ACTIVATION_NAMES
from megajax.models.block import Remat
from megajax.models.layers import WEIGHTS


def remat_policy(remat: str | tuple[str, ...]) -> Remat:
    """Return the wrapper of a layer function for `train.remat`: "none", "selective", "full" or the names to keep."""
    policies = jax.checkpoint_policies
    if remat == "none":
        policy: Callable[..., bool] = all_but_weights
    elif remat == "full":
        policy = policies.nothing_saveable
    else:
        policy = policies.save_only_these_names(*(ACTIVATION_NAMES if remat == "selective" else remat))

    def wrap(layer: Callable[..., Any], *, alone: bool = True) -> Callable[..., Any]:
        # A layer that is alone in a turn needs no barrier: the compiler cannot merge the loops of the two passes.
        return jax.checkpoint(layer, policy=policy, prevent_cse=not alone)

    return wrap


def all_but_weights(primitive: Any, *inputs: Any, **parameters: Any) -> bool:
    """Tell whether to keep an intermediate: everything but masks, and weights in the form in which a layer uses them.

    Views of weights are taken again, which costs nothing; keeping what a view is taken from would keep the weights.
    Weights gathered over `fsdp` and inputs gathered over `tensor` are gathered again, as in Megatron-LM. A mask follows
    from positions and segments; a pipeline would otherwise keep it, [N, S, S], in every slot. A split takes the weights
    of one layer out of those of a pattern of layers.
    """
    if primitive.name in ("reshape", "split", "broadcast_in_dim", "sharding_constraint"):
        return False
    if primitive.name in ("ge", "lt", "eq", "and", "sub") and not jnp.issubdtype(inputs[0].dtype, jnp.floating):
        return False
    return not (primitive.name == "name" and parameters["name"] == WEIGHTS)
