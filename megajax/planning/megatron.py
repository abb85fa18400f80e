"""Memory of Megatron-LM for the same model on the same mesh, measured as in published figures.

It differs from this implementation (`costs.memory`) in the bytes of a parameter, in the activations that a layer saves
(2205.05198, section 4), in the number of microbatches in flight, and in its stages: the first holds the embedding, and
the last holds the output matrix with all logits of a microbatch at once. Peaks are those of the allocator
(`torch.cuda.max_memory_allocated`).

Shapes: T tokens of a micro batch on a device, D embed, N heads, K kv heads, H head dim, F mlp, S sequence, V padded
vocabulary, L layers; P stages, v chunks per stage, M microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megajax.config import Config, InputError
from megajax.costs.device import Device
from megajax.costs.memory import StageMemory
from megajax.costs.weights import model_leaves

CUTS = {
    "layers": ("pipe",),
    "vocab": ("tensor",),
    "kv_heads": ("tensor",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
}
"""Logical axis -> mesh axes that cut it.

Norms, row-parallel biases and positions are whole on every tensor rank.
"""


FIRST = {"word_embedding", "position_embedding", "token_type_embedding", "embedding_norm"}
"""First words in the names of the parameters on the first stage."""
LAST = {"final_norm", "transform", "transform_bias", "transform_norm", "head_bias"}
LAST |= {"pooler", "pooler_bias", "pair_head", "pair_bias"}
"""Parameters of the last stage, without the output matrix, by the first word of their names."""


@dataclass(frozen=True)
class Practice:
    """The bytes by which Megatron-LM's relatives differ from it; the defaults are its own, in bf16 or fp16."""

    gradients: int = 4
    """Bytes of a parameter's gradient, an fp32 sum."""
    moments: int = 8
    """Bytes of a parameter's moments, besides 4 for the master weights.

    The distributed optimizer (ZeRO-1) splits both over `data`.
    """
    logits: int = 6
    """Bytes of a logit: 16 bits from the matrix product, and fp32 for the softmax, which is computed in place."""
    swiglu: int = 6
    """Bytes of a hidden unit of a gated MLP: both inputs, and their fused product."""
    keeps_gathered: bool = False
    """Whether matrix products keep the inputs that sequence parallelism gathers, instead of gathering them again."""


MEGATRON_LM = Practice()


def megatron_memory(
    config: Config, mesh: Mapping[str, int], stage: int, practice: Practice = MEGATRON_LM
) -> StageMemory:
    """Return the bytes of one device of a pipeline stage.

    A parameter takes 18 bytes, with `parallel.zero` (the distributed optimizer) 6 + 12 / data. `train.remat` is
    Megatron-LM's recomputation granularity. Attention is flash attention unless `train.attention` is "xla". `fsdp` cuts
    all bytes of a parameter; layers that are gathered for a moment are not counted.

    Args:
        config: configuration with a known vocabulary.
        mesh: size of every axis.
        stage: number of the stage, 0 to P - 1.
        practice: bytes by which the framework counts.

    Raises:
        InputError: `train.remat` names activations.
    """
    device, parameters = Device(config, mesh), stage_parameters(config, mesh, stage)
    at_rest = parameters / (mesh["data"] if config.parallel.zero else 1)
    activations = layers_in_flight(config, mesh, stage) * layer_activations(config, mesh, practice)
    return StageMemory(
        weights=4 * at_rest,
        optimizer=practice.moments * at_rest,
        gradients=practice.gradients * parameters,
        compute_copy=2 * parameters,
        activations=activations + (_embedding_masks(device) if stage == 0 else 0),
        logits=_logits(device, practice) if stage == mesh["pipe"] - 1 else 0,
        workspace=_recomputed(device, practice),
    )


def check_like_megatron(config: Config) -> None:
    """Refuse models and layouts that the accounting of Megatron-LM here does not cover.

    Raises:
        InputError: there is no accounting; the message names the kind of model or the key.
    """
    model = config.model
    lacking = {
        "model.experts: it drops tokens or pads them, as its options say": model.experts > 0,
        f"model.family {model.family}: it splits the pipeline between encoder and decoder": model.is_encoder_decoder,
        "parallel.whole_heads: it has none": config.parallel.whole_heads,
    }
    of_gemma = ("branch_norm", "attention_softcap", "logit_softcap", "layer_pattern")
    lacking |= {f"model.{key}: no published figure has it": bool(getattr(model, key)) for key in of_gemma}
    for reason, applies in lacking.items():
        if applies:
            raise InputError(f"Megatron-LM's memory and time are not planned with {reason}; leave like=megatron out")


def stage_parameters(config: Config, mesh: Mapping[str, int], stage: int) -> float:
    """Return the number of parameters on one device of a stage; a tied embedding is on the first and the last."""
    model, padding = config.model, 128 * mesh["tensor"]
    if model.vocab_size is None:
        raise InputError("model.vocab_size is not known: set it, or give a tokenizer")
    vocabulary = -(-model.vocab_size // padding) * padding
    kinds = {"blocks"}
    kinds |= FIRST if stage == 0 else set()
    kinds |= LAST | {"word_embedding" if model.tied_head else "head"} if stage == mesh["pipe"] - 1 else set()
    most = -(-model.num_layers // mesh["pipe"]) * mesh["pipe"] / model.num_layers  # if layers do not divide
    total = 0.0
    for leaf in model_leaves(model):
        if leaf.name.split(".")[0] in kinds:
            cuts = [axis for name in leaf.axes for axis in CUTS.get(name, ())]
            size = leaf.size(vocabulary) * (most if "layers" in leaf.axes else 1)
            total += size / prod(mesh[axis] for axis in cuts)
    return total


def layers_in_flight(config: Config, mesh: Mapping[str, int], stage: int) -> int:
    """Return the largest number of layers x microbatches in flight in Megatron-LM's 1F1B.

    Their activations wait for the backward pass. The schedule may be interleaved: with v chunks the first stage holds
    (1 + (P - 1) / P v) L of them (2205.05198, section 4.2.3), if M is large enough.
    """
    stages, chunks, microbatches = mesh["pipe"], config.parallel.chunks, Device(config, mesh).microbatches
    layers = -(-config.model.num_layers // (stages * chunks))
    if chunks == 1:
        return layers * min(microbatches, stages - stage)
    return layers * min(microbatches * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1)


def layer_activations(config: Config, mesh: Mapping[str, int], practice: Practice = MEGATRON_LM) -> float:
    """Return the bytes that one layer keeps per microbatch for the backward pass (2205.05198, table 2)."""
    device, remat = Device(config, mesh), config.train.remat
    if remat not in ("none", "selective", "full"):
        raise InputError("train.remat names activations, Megatron-LM cannot: choose none, selective or full")
    if remat == "full":
        return _tokens(device) * 2 * config.model.hidden_size / device.stream_ways
    return _outside_core(device, practice) + (_core(device) if remat == "none" else 0)


def _outside_core(device: Device, practice: Practice) -> float:
    """Return the bytes that a layer keeps outside the attention core."""
    model = device.config.model
    q, k = model.num_heads * model.head_size, model.kv_heads * model.head_size
    dropout = 2 * (model.hidden_dropout > 0)  # masks of one byte, after attention and MLP
    norms, inputs = 4 * model.hidden_size, 4 * model.hidden_size  # inputs and outputs of both norms
    ways = device.stream_ways
    stream = norms / ways + inputs / (1 if practice.keeps_gathered else ways) + dropout * model.hidden_size / ways
    grouped = 2 * q * (k < q)  # a contiguous copy of the queries, if they are not adjacent
    mlp = (practice.swiglu if model.gated else 4) * model.ffn_size
    inside = 2 * (q + 2 * k) + grouped + 2 * q + mlp
    return _tokens(device) * (stream + inside / device.mesh["tensor"])


def _core(device: Device) -> float:
    """Return the bytes that the attention core keeps.

    They are the softmax of the scores, 16 bits each, and if there is dropout its mask and result; flash attention keeps
    none.
    """
    if device.config.train.attention != "xla":
        return 0
    model, sequence = device.config.model, device.config.data.seq_length
    score = 5 if model.attention_dropout > 0 else 2
    return _tokens(device) * score * model.num_heads * sequence / device.mesh["tensor"]


def _recomputed(device: Device, practice: Practice) -> float:
    """Return the bytes of activations of the one layer that is being recomputed."""
    remat, core = device.config.train.remat, _core(device)
    return {"none": 0, "selective": core, "full": core + _outside_core(device, practice)}[str(remat)]


def _embedding_masks(device: Device) -> float:
    """Return the bytes of the embedding's dropout masks, for the microbatches in flight on the first stage."""
    model = device.config.model
    if model.hidden_dropout == 0:
        return 0
    in_flight = min(device.microbatches, device.mesh["pipe"])
    return in_flight * _tokens(device) * model.hidden_size / device.stream_ways


def _logits(device: Device, practice: Practice) -> float:
    """Return the bytes of the logits of a microbatch, and of the inputs of final norm and output matrix."""
    model = device.config.model
    assert model.vocab_size is not None
    stream = 4 * model.hidden_size / device.stream_ways
    return _tokens(device) * (stream + practice.logits * model.vocab_size / device.mesh["tensor"])


def _tokens(device: Device) -> float:
    return device.tokens(device.config.data.seq_length)
