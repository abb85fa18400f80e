"""Which activations of a block are kept for the backward pass: a policy is a set of names (2205.05198 §5).

Blocks tag what is worth keeping (`jax.ad_checkpoint.checkpoint_name`); everything else is computed again. Per layer and
microbatch, in 16-bit elements, s sequence, b batch, h embed, t tensor (sequence parallel, GELU MLP of 4 h):

    none        XLA keeps what the backward pass needs, scores of the attention included with the xla kernel
    selective   the names below: (2 + 2 + 6 + 2 + 8) s b h / t = 20 s b h / t bytes (Megatron: 34)
    full        2 s b h / t bytes, the block input
"""

from __future__ import annotations

import jax

from megajax.models.block import Remat

SELECTIVE = ("block_input", "attention_residual", "qkv", "attention_out", "attention_stats", "mlp_hidden")


def remat_policy(remat: str | tuple[str, ...]) -> Remat:
    """The wrapper of a layer function for `train.remat`: "none", "selective", "full" or the names to keep."""
    if remat == "none":
        return lambda layer: layer
    if remat == "full":
        return lambda layer: jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    names = SELECTIVE if remat == "selective" else tuple(remat)
    return lambda layer: jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))
