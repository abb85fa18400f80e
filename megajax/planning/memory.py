"""What a device has to hold during a training step of this implementation, in closed form.

Exact is what lasts: weights and optimizer state are the model's own arrays under the rule table. The rest is what XLA
keeps at the moment when it keeps most, which is one of two:

    a layer's backward    gradient sums, compute copy, saved activations, the gradients of all layers that this
                          backward runs through, and what one layer works with
    head and loss         the same without layer and layer gradients, but with the gradient of the output matrix

Not in it: the CUDA context (0.5-0.9 GiB), NCCL (1-2 GiB), scratch of autotuned kernels, fragmentation.

Shapes: B samples of a micro batch, S sequence, T = B S / context tokens of a device, D embed, N heads, K kv heads,
H head dim, F mlp, V padded vocabulary, L layers; P stages, v chunks per stage, M microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from megajax.config import Config, ConfigError
from megajax.config.train import ACTIVATION_NAMES
from megajax.data.batch import batch_arrays
from megajax.models.cross_entropy import CHUNK_LOGITS
from megajax.parallel.kernels import choose_attention
from megajax.parallel.pipeline.schedule import Interleaved1F1B
from megajax.planning.weights import Counts, count_weights

GIB = 2**30
FP32 = 4


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one device of a pipeline stage, at the moment when most is held; the fields add up."""

    weights: float
    """fp32 master weights."""
    optimizer: float
    """fp32 moments."""
    gradients: float
    """fp32 sums over the microbatches."""
    compute_copy: float
    """Weights cast once a step; none in fp32."""
    activations: float
    """Saved for the backward pass: of all layers of one microbatch, or the pipeline's ring."""
    logits: float
    """Gradients of embedding and output matrix, and if the peak is there, the fp32 logits of a chunk of tokens."""
    workspace: float
    """Of the layers at work: their gradients, gathered weights, activations, scores where a kernel holds them."""

    @property
    def persistent(self) -> float:
        """What lasts between steps: XLA's arguments, but for the batch."""
        return self.weights + self.optimizer

    @property
    def temporary(self) -> float:
        """What a step needs on top: XLA's temporaries."""
        return self.total - self.persistent

    @property
    def total(self) -> float:
        """The sum of all fields."""
        return sum(getattr(self, field.name) for field in fields(self))


def stage_memory(config: Config, mesh: Mapping[str, int], stage: int) -> StageMemory:
    """What a device of a pipeline stage holds.

    All stages hold the same: as many layers, a ring as long, the same share of embedding and head.

    Args:
        config: with a known vocabulary.
        mesh: size of every axis.
        stage: 0 to P - 1.

    Raises:
        ConfigError: there is no such stage, or the stages do not divide the layers.
    """
    if not 0 <= stage < mesh["pipe"]:
        raise ConfigError(f"there is no pipeline stage {stage}: choose one of 0 to {mesh['pipe'] - 1}")
    device = _Device(config, mesh)
    counts = device.counts
    logits, workspace = max(device.backward, device.head, key=sum)
    return StageMemory(
        weights=FP32 * counts.at_rest,
        optimizer=FP32 * counts.moments,
        gradients=FP32 * counts.step if device.accumulates else 0,
        compute_copy=device.width * counts.step if device.width < FP32 else 0,
        activations=device.saved_layers * saved_per_layer(config, mesh),
        logits=logits,
        workspace=workspace,
    )


def heaviest(config: Config, mesh: Mapping[str, int]) -> StageMemory:
    """The fullest device of all: any, as stages do not differ."""
    return stage_memory(config, mesh, 0)


def state_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Bytes of a device for fp32 weights, optimizer state and gradient sums."""
    counts = _Device(config, mesh).counts
    return FP32 * (counts.at_rest + counts.moments + counts.step)


def saved_per_layer(config: Config, mesh: Mapping[str, int]) -> float:
    """Bytes that one layer and microbatch keep for the backward pass under `train.remat`.

    With a GELU MLP of 4 D, all that is tagged makes 20 T D / tensor bytes in 16 bits; Megatron-LM keeps 34 (2205.05198,
    equation 6).
    """
    device, model, remat = _Device(config, mesh), config.model, config.train.remat
    width, tensor = device.width, mesh["tensor"]
    q, k = model.num_heads * model.head_size, model.kv_heads * model.head_size
    residual = model.hidden_size / (tensor if config.parallel.sequence_parallel else 1)
    if remat == "none":
        norms = 2 * 3 * FP32 * residual + 3 * FP32 * model.qk_norm * (q + k) / tensor
        masks = 2 * (model.hidden_dropout > 0) * residual
        products = 2 * width * residual + width * (2 * (q + k) + 6 * model.ffn_size) / tensor
        return device.tokens * (norms + masks + products + device.scores_saved)
    numbers = {
        "block_input": residual,
        "attention_residual": residual,
        "qkv": (q + 2 * k) / tensor,
        "attention_out": q / tensor,
        "mlp_hidden": device.mlp_inputs * model.ffn_size / tensor,
        "mlp_residual": residual if model.norm_placement == "post" else 0,  # else the next layer's input
    }
    presets: dict[str, tuple[str, ...]] = {"selective": ACTIVATION_NAMES, "full": ()}
    kept = presets[remat] if isinstance(remat, str) else remat
    # The loop over the layers carries a layer's input, which is therefore kept whatever is named.
    return device.tokens * width * sum(numbers[name] for name in {"block_input", *kept})


@dataclass(frozen=True)
class _Device:
    """One device's part in a step."""

    config: Config
    mesh: Mapping[str, int]

    @cached_property
    def counts(self) -> Counts:
        """Weights of this device."""
        return count_weights(self.config, self.mesh)

    @property
    def width(self) -> int:
        """Bytes of a number in the forward and backward pass."""
        return FP32 if self.config.train.precision == "fp32" else 2

    @property
    def tokens(self) -> float:
        """T."""
        return self.config.train.micro_batch_size * self.config.data.seq_length / self.mesh["context"]

    @property
    def mlp_inputs(self) -> int:
        """Input matrices of the MLP."""
        return 2 if self.config.model.gated else 1

    @property
    def microbatches(self) -> int:
        """M."""
        train = self.config.train
        return train.global_batch_size // (train.micro_batch_size * self.mesh["data"] * self.mesh["fsdp"])

    @property
    def accumulates(self) -> bool:
        """Whether gradients are summed; those of a single microbatch go into the update as they are."""
        return self.mesh["pipe"] > 1 or self.microbatches > 1

    @property
    def saved_layers(self) -> int:
        """Layers whose activations are kept: with stages, in the slots of the ring and in the one at work."""
        layers, chunks = self.config.model.num_layers, self.config.parallel.chunks
        if self.mesh["pipe"] == 1:
            return layers
        schedule = Interleaved1F1B(self.mesh["pipe"], chunks, self.microbatches)
        return (schedule.ring_slots + 1) * schedule.layers_per_chunk(layers)

    @property
    def fused(self) -> bool:
        """Whether the attention kernel on a GPU holds no scores."""
        return choose_attention(self.config, "gpu", batch_arrays(self.config.model, self.config.data)).name == "cudnn"

    @property
    def scores(self) -> float:
        """Scores of a query token of this device."""
        return self.config.data.seq_length * self.config.model.num_heads / self.mesh["tensor"]

    @property
    def scores_saved(self) -> float:
        """Bytes of a query token that the attention kernel keeps if nothing is recomputed."""
        model = self.config.model
        if self.fused:
            return model.num_heads * (self.width * model.head_size + FP32) / self.mesh["tensor"]
        return self.scores * (FP32 + self.width + (model.attention_dropout > 0))

    @property
    def table(self) -> float:
        """Numbers of the output matrix, gathered over `fsdp`."""
        model = self.config.model
        return model.padded_vocab_size * model.hidden_size / (self.mesh["pipe"] * self.mesh["tensor"])

    @property
    def backward(self) -> tuple[float, float]:
        """Bytes of logits and workspace in the backward of a layer."""
        model, width, counts = self.config.model, self.width, self.counts
        chunks = self.config.parallel.chunks
        # The gradients of all layers that the loop runs through. Stages also hold the zeros that it starts from and,
        # if they have several chunks, the weights of this one.
        copies = 1 if self.mesh["pipe"] == 1 else 2 if chunks == 1 else 3
        gradients = copies * width * counts.blocks / chunks
        # What attention and MLP start from, gathered over `tensor`, the hidden units in and out, and their gradients.
        hidden = 2 * (self.mlp_inputs + 1) * model.ffn_size / self.mesh["tensor"]
        activations = self.tokens * width * (4 * model.hidden_size + hidden)
        scores = 0 if self.fused else self.tokens * self.scores * (2 * FP32 + width)
        gathered = 2 * width * counts.layer if self.mesh["fsdp"] > 1 else 0
        return 2 * FP32 * self.table / self.mesh["fsdp"], gradients + activations + scores + gathered

    @property
    def head(self) -> tuple[float, float]:
        """Bytes of logits and workspace while the loss is computed."""
        chunk = min(FP32 * CHUNK_LOGITS, logits_bytes(self.config, self.mesh))
        # The gradient of the output matrix and its transpose; over `fsdp`, one more to scatter, and the matrix itself.
        matrix = (3 * FP32 + self.width if self.mesh["fsdp"] > 1 else 2 * FP32) * self.table
        return matrix + 2 * chunk, 0.0


def logits_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """fp32 logits [B, S, V] of a micro batch, were they held all at once; their gradient is as large again."""
    tokens = config.train.micro_batch_size * config.data.seq_length // mesh["context"]
    return 4 * tokens * config.model.padded_vocab_size // (mesh["pipe"] * mesh["tensor"])


def describe_logits(config: Config, mesh: Mapping[str, int], memory: float | None) -> str:
    """How many logits are held, and how many there would be without the chunks of `models.cross_entropy`.

    Args:
        config: with a known vocabulary.
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
