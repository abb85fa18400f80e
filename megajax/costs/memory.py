"""Bytes that a device holds during a training step of this implementation, in closed form.

Bytes that last between steps are exact: weights and optimizer state are the model's own arrays under the rule table.
The others are the bytes that XLA keeps at the moment when it keeps most, which is one of two:

    a layer's backward    gradient sums, compute copy, saved activations, the gradients of all layers (of one, with
                          stages), and what one layer works with
    head and loss         the same without layer and layer gradients, but with the gradient of the output matrix

Not included are the CUDA context (0.5-0.9 GiB), NCCL (1-2 GiB), scratch of autotuned kernels and fragmentation.

Shapes: B samples of a micro batch, S sequence, T = B S / context tokens of a device, D embed, N heads, K kv heads,
H head dim, F mlp, V padded vocabulary, L layers; P stages, v chunks per stage, M microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp

from megajax.config import Config, InputError
from megajax.config.model import Activation
from megajax.config.train import ACTIVATION_NAMES
from megajax.costs.device import Device, expert_load
from megajax.costs.weights import Counts, count_weights, require_one_kind
from megajax.models.families import batch_arrays
from megajax.models.layers import activate, capped
from megajax.models.losses import CHUNK_LOGITS
from megajax.models.model import Stack
from megajax.parallel.kernels import choose_attention

GIB = 2**30
FP32 = 4


@dataclass(frozen=True)
class StageMemory:
    """The bytes of one device of a pipeline stage, at the moment when most is held; the fields add up."""

    weights: float
    """Master weights, fp32."""
    optimizer: float
    """Moments of the optimizer, fp32."""
    gradients: float
    """Sums of gradients over the microbatches, fp32."""
    compute_copy: float
    """Weights cast once a step; none in fp32."""
    activations: float
    """Activations saved for the backward pass: those of all layers for one microbatch, or the pipeline's ring."""
    logits: float
    """Gradients of embedding and output matrix and, if the peak is there, fp32 logits of a chunk of tokens."""
    workspace: float
    """Bytes of the layers at work: gradients, gathered weights, activations, and scores that a kernel holds."""

    @property
    def persistent(self) -> float:
        """Return the bytes that last between steps: XLA's arguments without the batch."""
        return self.weights + self.optimizer

    @property
    def temporary(self) -> float:
        """Return the bytes that a step needs besides: XLA's temporaries."""
        return self.total - self.persistent

    @property
    def total(self) -> float:
        """Return the sum of all fields."""
        return sum(getattr(self, field.name) for field in fields(self))


def stage_memory(config: Config, mesh: Mapping[str, int], stage: int) -> StageMemory:
    """Return the memory of a device of a pipeline stage.

    All stages hold the same: equally many layers, equally long rings, and the same share of embedding and head.

    Args:
        config: configuration with a known vocabulary.
        mesh: size of every axis.
        stage: number of the stage, 0 to P - 1.

    Raises:
        InputError: there is no such stage, the stages do not divide the layers, or these differ in what they hold.
    """
    if not 0 <= stage < mesh["pipe"]:
        raise InputError(f"there is no pipeline stage {stage}: choose one of 0 to {mesh['pipe'] - 1}")
    device = _Holder(config, mesh)
    counts = device.counts
    logits, workspace = max(device.backward, device.head, key=sum)
    return StageMemory(
        weights=FP32 * counts.at_rest,
        optimizer=FP32 * counts.moments,
        gradients=FP32 * counts.step if device.accumulates else 0,
        compute_copy=device.width * counts.step if device.width < FP32 else 0,
        activations=device.saved,
        logits=logits,
        workspace=workspace,
    )


def heaviest(config: Config, mesh: Mapping[str, int]) -> StageMemory:
    """Return the memory of the fullest device, which may be any device, because stages do not differ."""
    return stage_memory(config, mesh, 0)


def state_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Return the bytes of a device for fp32 weights, optimizer state and gradient sums."""
    counts = _Holder(config, mesh).counts
    return FP32 * (counts.at_rest + counts.moments + counts.step)


def saved_per_layer(config: Config, mesh: Mapping[str, int], stack: Stack | None = None) -> float:
    """Return the bytes that one layer keeps per microbatch for the backward pass under `train.remat`.

    With a GELU MLP of 4 D, all tagged activations make 20 T D / tensor bytes in 16 bits; Megatron-LM keeps 34
    (2205.05198, equation 6). Experts of a mixture keep nothing: their hidden units are always computed again.

    Args:
        config: configuration with a known vocabulary.
        mesh: size of every axis.
        stack: stack to which the layer belongs; None = the last one.

    Raises:
        InputError: layers differ in what they hold.
    """
    require_one_kind(config.model)
    device, model, remat = _Holder(config, mesh), config.model, config.train.remat
    stack = stack or device.stacks[-1]
    width, residual = device.width, model.hidden_size / device.stream_ways
    q, k = device.heads * model.head_size, device.kv_heads * model.head_size
    tokens, encoded = device.tokens(stack.sequence), device.tokens(stack.memory)
    crossed = stack.memory > 0
    if remat == "none":
        norms = (2 + crossed + 2 * model.branch_norm) * 3 * FP32 * residual + 3 * FP32 * model.qk_norm * (q + k)
        masks = (2 + crossed) * (model.hidden_dropout > 0) * residual
        routing = 3 * FP32 * model.experts * residual / model.hidden_size
        products = (2 + crossed) * width * residual + width * (2 + 2 * crossed) * (q + k)
        hidden = _kept_of_unit(model.activation, device.mlp_inputs, width) * device.units
        saved = tokens * (norms + masks + routing + products + hidden + device.scores_saved(stack))
        return saved + encoded * width * 2 * q
    numbers = {
        "block_input": tokens * residual,
        "attention_residual": (1 + crossed) * tokens * residual,
        "qkv": tokens * (q + 2 * k + crossed * q) + encoded * 2 * q,
        "attention_out": (1 + crossed) * tokens * q,
        "branch_output": 2 * tokens * residual * model.branch_norm,
        "mlp_hidden": tokens * device.mlp_inputs * device.units,
        "mlp_residual": tokens * residual if model.norm_placement == "post" else 0,  # otherwise the next layer's input
    }
    presets: dict[str, tuple[str, ...]] = {"selective": ACTIVATION_NAMES, "full": ()}
    kept = presets[remat] if isinstance(remat, str) else remat
    # The loop over the layers carries a layer's input, which is therefore kept under every policy.
    return width * sum(numbers[name] for name in {"block_input", *kept})


class _Holder(Device):
    """Derive the bytes that a device holds during a step."""

    @cached_property
    def counts(self) -> Counts:
        """Return the counts of this device's weights."""
        return count_weights(self.config, self.mesh)

    @property
    def mlp_inputs(self) -> int:
        """Return the number of input matrices of the MLP."""
        return 2 if self.config.model.gated else 1

    @property
    def units(self) -> float:
        """Return the number of hidden units of the MLP on this device, F / tensor; in a mixture, of the shared MLP."""
        model = self.config.model
        return (model.shared_ffn_size if model.experts else model.ffn_size) / self.mesh["tensor"]

    @property
    def accumulates(self) -> bool:
        """Tell whether gradients are summed; those of a single microbatch go into the update directly."""
        return self.mesh["pipe"] > 1 or self.microbatches > 1

    @property
    def saved(self) -> float:
        """Return the bytes that are kept for the backward pass.

        With stages they are in the slots of the ring, and in the slot at work.
        """
        config = self.config
        if self.mesh["pipe"] == 1:
            each = (stack.layers * saved_per_layer(config, self.mesh, stack) for stack in self.stacks)
            return sum(each) + self.stream(self.stacks[-1].memory)
        layers = (self.schedule.ring_slots + 1) * self.schedule.layers_per_chunk(config.model.num_layers)
        return layers * saved_per_layer(config, self.mesh)

    @property
    def fused(self) -> bool:
        """Tell whether the attention kernel on a GPU holds no scores."""
        return choose_attention(self.config, "gpu", batch_arrays(self.config.model, self.config.data)).name == "cudnn"

    def scores_saved(self, stack: Stack) -> float:
        """Return the bytes per query token that the attention kernel keeps if nothing is recomputed."""
        model = self.config.model
        if self.fused:
            return self.heads * (self.width * model.head_size + FP32)
        scores = self.heads * (stack.sequence + stack.memory)
        numbers = 1 + _kept_of_cap(model.attention_softcap)
        return scores * (numbers * FP32 + self.width + (model.attention_dropout > 0))

    @property
    def table(self) -> float:
        """Return the number of elements in the output matrix, gathered over `fsdp`."""
        model = self.config.model
        return model.padded_vocab_size * model.hidden_size / (self.mesh["pipe"] * self.mesh["tensor"])

    @property
    def backward(self) -> tuple[float, float]:
        """Return the bytes of logits and workspace in the backward pass of a layer."""
        width, counts = self.width, self.counts
        # The loop holds gradients of all layers, and of both tables. The pipeline adds those of a layer or table to the
        # sums before it computes the next.
        stages = self.mesh["pipe"]
        layers, tables = (1, 2) if stages == 1 else (self.config.model.num_layers / stages, 1)
        gradients = width * counts.blocks / layers
        gathered = 2 * width * counts.layer if self.mesh["fsdp"] > 1 else 0
        layer = max(self._layer(stack) for stack in self.stacks)
        workspace = gradients + gathered + layer + self._bias + self._experts + self._pattern
        return tables * FP32 * self.table / self.mesh["fsdp"], workspace

    def _layer(self, stack: Stack) -> float:
        """Return the bytes of activations and scores while a layer is at work."""
        # The inputs of attention and MLP, gathered over `tensor`, the hidden units before and after activation, and
        # gradients.
        hidden = 2 * (self.mlp_inputs + 1) * self.units
        tokens, keys = self.tokens(stack.sequence), max(stack.sequence, stack.memory)
        activations = tokens * self.width * (4 * self.config.model.hidden_size + hidden)
        encoded = self.tokens(stack.memory) * self.width * 2 * self.config.model.hidden_size
        numbers = 2 + (self.config.model.attention_softcap is not None)
        scores = 0 if self.fused else tokens * self.heads * keys * (numbers * FP32 + self.width)
        return activations + encoded + scores

    @property
    def _bias(self) -> float:
        """Return the bytes of the attention bias that the layers of T5's stacks share, and of its gradient."""
        places = sum(stack.sequence**2 for stack in self.stacks)
        return 2 * FP32 * self.heads * places if self.config.model.positions == "relative" else 0

    @property
    def _pattern(self) -> float:
        """Return the bytes of the copies that a scan over a pattern of layers makes.

        If the last pattern is broken off, the stack of all layers is cut in two. Otherwise the gradients of the layers
        of a pattern are stacked up. The only turn of a scan is unrolled and makes none.
        """
        layers, period = self.config.model.num_layers, len(self.config.model.layer_pattern)
        if self.mesh["pipe"] > 1 or period == 0 or layers < 2 * period:
            return 0
        return self.width * self.counts.blocks * (1 if layers % period else period / layers)

    @property
    def _experts(self) -> float:
        """Return the bytes with which the backward pass of a mixture works (see `models.experts`)."""
        model, width = self.config.model, self.width
        if not model.experts:
            return 0
        tokens, held = self.tokens(self.stacks[-1].sequence) * self.mesh["expert"], self.counts.experts
        rows = expert_load(model, tokens).block_rows
        one = held / (model.experts / self.mesh["expert"])
        # The experts' gradients are stacked by the loop over them (over `fsdp` they are counted as gathered), and
        # copied once more at its end. Gathered in their second dimension, the input matrices are transposed.
        inputs = self.mlp_inputs / (self.mlp_inputs + 1) * held
        stacked = held + (inputs if self.mesh["fsdp"] > 1 else held)
        # Inputs of the experts for all tokens, both ways, and fp32 sums; the gradient of an expert, and a block.
        streams = tokens * model.hidden_size * (2 * width + FP32)
        block = rows * model.expert_size / self.mesh["tensor"] * (self.mlp_inputs + 1) * (FP32 + width)
        return width * stacked + streams + FP32 * one + block

    @property
    def head(self) -> tuple[float, float]:
        """Return the bytes of logits and workspace while the loss is computed."""
        chunks = 2 * min(FP32 * CHUNK_LOGITS, logits_bytes(self.config, self.mesh))
        # The gradient of the output matrix and its transpose. Over `fsdp` there is no transpose, but the gathered
        # matrix. With stages there is no transpose either: they sum the gradient untransposed.
        other = self.width if self.mesh["fsdp"] > 1 else FP32 if self.mesh["pipe"] == 1 else 0
        return (FP32 + other) * self.table + chunks, 0.0


@cache
def _kept_of_cap(softcap: float | None) -> int:
    """Count the fp32 numbers that JAX keeps of a score to differentiate its cap: one or two, by the version of JAX."""
    keep = lambda scores: jax.vjp(partial(capped, softcap=softcap), scores)[1]  # noqa: E731
    kept = jax.tree.leaves(jax.eval_shape(keep, jax.ShapeDtypeStruct((1,), "float32")))
    return 0 if softcap is None else sum(array.ndim for array in kept)  # the factors have no dim


@cache
def _kept_of_unit(activation: Activation, parts: int, width: int) -> float:
    """Count the bytes that JAX keeps of a hidden unit of an MLP, with its input, to differentiate two layers of a scan.

    The number depends on the activation and on the version of JAX. Constants are not kept for every layer, so they do
    not count.
    """
    units, dtype = 8, jnp.float32 if width == FP32 else jnp.bfloat16
    wide, narrow = jax.ShapeDtypeStruct((2, 1, parts, units), dtype), jax.ShapeDtypeStruct((2, units, 1), dtype)

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return activate(jnp.einsum("d,daf->af", x, weights[0]), activation) @ weights[1], None

    run = lambda x, *weights: jax.lax.scan(layer, x, weights)[0]  # noqa: E731
    keep = lambda *inputs: jax.vjp(run, *inputs)[1]  # noqa: E731
    kept = jax.tree.leaves(jax.eval_shape(keep, jax.ShapeDtypeStruct((1,), dtype), wide, narrow))
    return sum(a.size * a.dtype.itemsize for a in kept if a.shape in ((2, units), (2, parts, units))) / (2 * units)


def logits_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Return the bytes of all fp32 logits [B, S, V] of a micro batch, if they were held at once.

    Their gradient takes the same again.
    """
    device = Device(config, mesh)
    tokens = int(device.tokens(device.stacks[-1].sequence))
    return 4 * tokens * config.model.padded_vocab_size // (mesh["pipe"] * mesh["tensor"])


def describe_logits(config: Config, mesh: Mapping[str, int], memory: float | None) -> str:
    """Return a text on the logits that are held, and on those that would be without `models.losses`'s chunks.

    Args:
        config: configuration with a known vocabulary.
        mesh: size of every axis.
        memory: bytes of a device; None = unknown.
    """
    whole = logits_bytes(config, mesh)
    chunk = min(4 * CHUNK_LOGITS, whole)
    text = f"in chunks of {chunk / GIB:.3f} GiB a device"
    if memory is not None and chunk < whole and 2 * whole > memory:
        text += (
            f": {whole:,} bytes for a whole micro batch, and as many for their gradient, do not fit in "
            f"{memory / GIB:.1f} GiB without a chunked loss or a smaller train.micro_batch_size"
        )
    return text
