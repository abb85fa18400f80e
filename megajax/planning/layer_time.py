"""Time of one layer, and of embedding, head and loss, for one microbatch on one device.

A layer is four matrix products, with the attention core between the first two. At each of them the residual stream
enters or leaves the tensor-parallel region: one all-gather or reduce-scatter over `tensor` (2205.05198, figure 5), or
half an all-reduce, which is as much, without sequence parallelism.

Shapes: B samples of a micro batch, S sequence, T = B S / context tokens of a device, D embed, N heads, K kv heads,
H head dim, F mlp, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from megajax.config.config import Config
from megajax.config.model import ModelConfig
from megajax.config.train import ACTIVATION_NAMES
from megajax.data.batch import batch_arrays
from megajax.models.sizes import parameter_counts
from megajax.parallel.kernels import choose_attention
from megajax.planning.hardware import Gpu
from megajax.planning.memory import saved_per_layer
from megajax.planning.operations import (
    LAUNCH,
    WIDTH,
    Numbers,
    Work,
    attention_seconds,
    beside,
    gather_seconds,
    matmul_seconds,
    memory_seconds,
    total,
)
from megajax.planning.trainers import Trainer

KERNELS = 3
"""Elementwise kernels around a matrix product, forward."""
BACKWARD_TRAFFIC = 1.5
"""Memory traffic of an elementwise operation's backward over that of its forward."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of fused attention's backward over those of its forward: five products for two (2205.14135)."""
BLOCK_PARAMETERS = ("attention_norm", "qkv", "qk_norm", "attention_out", "mlp_norm", "fc1", "fc2")


@dataclass(frozen=True)
class Cut:
    """One device's share of a layer and how it is computed. Layouts that have it in common share its time."""

    model: ModelConfig
    gpu: Gpu
    trainer: Trainer
    samples: int
    """B."""
    sequence: int
    """S."""
    tensor: int
    context: int
    fsdp: int
    sequence_parallel: bool
    remat: str | tuple[str, ...]
    kernel: str
    """Of the attention: "cudnn" is fused, others pass the scores through memory."""
    numbers: Numbers
    """Of activations."""
    copied: float
    """Bytes that are copied in each direction to save a layer's activations."""

    @classmethod
    def of(cls, config: Config, mesh: Mapping[str, int], gpu: Gpu, trainer: Trainer) -> Cut:
        """That of a configuration with a known vocabulary on a mesh."""
        copied = 0.0
        if trainer.scans_layers:
            kernel = choose_attention(config, "gpu", batch_arrays(config.model, config.data)).name
            copied = _copied(config, mesh)
        else:
            kernel = "xla" if config.train.attention == "xla" else "cudnn"
        return cls(
            model=config.model,
            gpu=gpu,
            trainer=trainer,
            samples=config.train.micro_batch_size,
            sequence=config.data.seq_length,
            tensor=mesh["tensor"],
            context=mesh["context"],
            fsdp=mesh["fsdp"],
            sequence_parallel=config.parallel.sequence_parallel,
            remat=config.train.remat,
            kernel=kernel,
            numbers="fp32" if config.train.precision == "fp32" else "half",
            copied=copied,
        )

    @property
    def tokens(self) -> float:
        """T."""
        return self.samples * self.sequence / self.context

    @property
    def stream(self) -> float:
        """Bytes of the residual stream [T, D], whole over `tensor`."""
        return WIDTH[self.numbers] * self.tokens * self.model.hidden_size

    @property
    def residual(self) -> float:
        """Bytes of it on this device."""
        return self.stream / (self.tensor if self.sequence_parallel else 1)

    @property
    def products(self) -> Numbers:
        """Numbers that the blocks' matrix products take."""
        return "fp8" if self.trainer.fp8 else self.numbers

    @property
    def border(self) -> float:
        """Seconds of a gather or scatter of the residual stream over `tensor`."""
        return gather_seconds(self.gpu, self.stream, self.tensor, 1)

    def memory(self, size: float) -> Work:
        """Reading and writing `size` bytes."""
        return Work(memory=memory_seconds(self.gpu, size))


def _copied(config: Config, mesh: Mapping[str, int]) -> float:
    """Bytes read and written to put a layer's activations into the stack of all layers, or to take them out again.

    What a matrix product or an attention kernel makes or takes, which is what has a name, is copied; anything else is
    computed in its place. With stages, all of it goes through the ring as well.
    """
    saved = named = saved_per_layer(config, mesh)
    if config.train.remat == "none":
        named = saved_per_layer(replace(config, train=replace(config.train, remat="selective")), mesh)
    return (saved + named) * (1 if mesh["pipe"] == 1 else 2)


class Product(NamedTuple):
    """A matrix product [T, k] x [k, n] of the forward pass and the elementwise operations around it."""

    makes: str
    """Name of the activation that it ends in."""
    enters: bool
    """Whether its input is gathered over `tensor`; otherwise its output is scattered."""
    k: float
    n: float
    traffic: float
    """Bytes of the elementwise operations."""


def products(cut: Cut) -> tuple[Product, ...]:
    """Those of a layer, in order."""
    model, t, width = cut.model, cut.tensor, WIDTH[cut.numbers]
    D, F = model.hidden_size, model.ffn_size / t
    gates = 2 if model.gated else 1
    q, kv = model.num_heads * model.head_size / t, model.kv_heads * model.head_size / t
    norm, add = 2 * cut.residual, 3 * cut.residual
    rotate = 2 * width * cut.tokens * (q + kv) if model.positions == "rope" else 0
    activate = width * cut.tokens * (gates + 1) * F
    cast = 3 * cut.tokens if cut.trainer.fp8 else 0  # per input: read 16 bits, write 8
    return (
        Product("qkv", True, D, q + 2 * kv, norm + rotate + cast * D),
        Product("attention_residual", False, q, D, add + cast * q),
        Product("mlp_hidden", True, D, gates * F, norm + cast * D),
        Product("output", False, F, D, activate + add + cast * F),
    )


@cache
def layer_work(cut: Cut) -> tuple[Work, Work]:
    """Forward and backward of one layer and microbatch."""
    trainer, gpu = cut.trainer, cut.gpu
    core, core_back = _attention(cut)
    weights = layer_parameters(cut.model) / cut.tensor
    sums = trainer.sum_bytes / cut.fsdp + (4 if trainer.fp8 else 0)  # a cast reads 16 bits and writes 8, twice
    forward = total(_forward(cut, product) for product in products(cut)) + core + cut.memory(cut.copied)
    backward = total(_backward(cut, product) for product in products(cut)) + core_back + _repeated(cut, core)
    backward += cut.memory(cut.copied + sums * weights)
    size = WIDTH[cut.numbers] * weights
    gather = gather_seconds(gpu, size, cut.fsdp, cut.tensor * cut.context)
    # Every microbatch's gradient is summed over `context`; Megatron-LM counts these shards as replicas.
    shards = 2 * gather_seconds(gpu, size, cut.context, cut.tensor) if trainer.scans_layers else 0
    keys = 2 * WIDTH[cut.numbers] * cut.samples * cut.sequence * cut.model.kv_heads * cut.model.head_size / cut.tensor
    round_trip = gather_seconds(gpu, keys, cut.context, cut.tensor)
    hidden = trainer.hides_neighbours
    forward += Work(
        context=beside(round_trip, core.seconds if hidden else 0, round_trip / cut.context),
        fsdp=beside(gather, forward.computing),
    )
    backward += Work(
        context=beside(2 * round_trip, core_back.seconds if hidden else 0, 2 * round_trip / cut.context)
        + beside(shards, backward.computing),
        fsdp=beside(2 * gather, backward.computing),
    )
    return forward, backward


def _forward(cut: Cut, product: Product) -> Work:
    _, _, k, n, traffic = product
    seconds = matmul_seconds(cut.gpu, cut.tokens, k, n, cut.products)
    return Work(
        matmul=seconds,
        memory=memory_seconds(cut.gpu, traffic) + KERNELS * LAUNCH,
        tensor=beside(cut.border, seconds if cut.trainer.hides_tensor == "all" else 0, cut.border / cut.tensor),
        flops=2 * cut.tokens * k * n,
    )


def _backward(cut: Cut, product: Product) -> Work:
    """The gradient of the input needs all of the output's; while the one of the weights is computed, nothing waits."""
    _, enters, k, n, traffic = product
    dx = matmul_seconds(cut.gpu, cut.tokens, n, k, cut.products)
    dw = matmul_seconds(cut.gpu, k, cut.tokens, n, cut.products)
    hides, piece = cut.trainer.hides_tensor, cut.border / cut.tensor
    if enters:
        again = cut.border if cut.sequence_parallel else 0  # the input, for the gradient of the weights
        tensor = beside(cut.border, 0 if hides == "nothing" else dw, piece) + beside(again, dx)
    else:
        tensor = beside(cut.border, dx if hides == "all" else 0, piece)
    return Work(
        matmul=dx + dw,
        memory=BACKWARD_TRAFFIC * (memory_seconds(cut.gpu, traffic) + KERNELS * LAUNCH),
        tensor=tensor,
        flops=4 * cut.tokens * k * n,
    )


def _attention(cut: Cut) -> tuple[Work, Work]:
    """Scores, softmax and weighted sum of the values, forward and backward."""
    width = cut.model.head_size
    scores = cut.tokens * cut.sequence * cut.model.num_heads / cut.tensor
    if cut.kernel == "cudnn":
        once, back = 2 * scores * width, BACKWARD_ATTENTION * 2 * scores * width
        return (
            Work(attention=attention_seconds(cut.gpu, once), flops=once),
            Work(attention=attention_seconds(cut.gpu, back), flops=back),
        )
    # A batched product fills the GPU as one large one does.
    rows = scores / cut.sequence
    outer = matmul_seconds(cut.gpu, rows, width, cut.sequence, cut.numbers)
    inner = matmul_seconds(cut.gpu, rows, cut.sequence, width, cut.numbers)
    forward, backward = cut.trainer.score_bytes
    return (
        Work(matmul=outer + inner, flops=4 * scores * width) + cut.memory(forward * scores),
        Work(matmul=2 * (outer + inner), flops=8 * scores * width) + cut.memory(backward * scores),
    )


def _repeated(cut: Cut, core: Work) -> Work:
    """What the backward pass computes again."""
    if cut.remat == "none":
        return Work()
    kept = set(ACTIVATION_NAMES) if cut.remat == "selective" else set() if cut.remat == "full" else set(cut.remat)
    *inner, last = products(cut)
    again = [product for product in inner if product.makes not in kept]
    if not cut.trainer.scans_layers:
        repeated = total(_forward(cut, product) for product in (again if kept else [*again, last]))
        return repeated + (core if cut.kernel != "cudnn" or "attention_out" not in kept else Work())
    # Norms and activation are not among the named activations, nor are the softmax statistics of a fused kernel.
    elementwise = sum(p.traffic for p in (*inner, last) if p not in again and p.makes != "attention_residual")
    return total(_forward(cut, product) for product in again) + cut.memory(elementwise) + core


@cache
def vocabulary_work(cut: Cut, stages: int, stride: int) -> Work:
    """Embedding, head and loss of one microbatch, forward and backward, on a device that takes part.

    Args:
        cut: the device's share.
        stages: how many pipeline stages compute it together.
        stride: from a device to that of the next stage.
    """
    trainer, gpu, D = cut.trainer, cut.gpu, cut.model.hidden_size
    V = cut.model.padded_vocab_size / (cut.tensor * stages)
    shapes = ((cut.tokens, D, V), (cut.tokens, V, D), (D, cut.tokens, V))
    matmul = sum(matmul_seconds(gpu, m, k, n, cut.numbers) for m, k, n in shapes)
    # Both tables are gathered over `fsdp` as they are computed with, and their gradients scattered in fp32.
    table = gather_seconds(gpu, 4 * V * D, cut.fsdp, cut.tensor * cut.context)
    work = Work(
        matmul=matmul,
        tensor=4 * cut.border,
        fsdp=beside(2 * (WIDTH[cut.numbers] / 4 + 1) * table, matmul),
        # All-reduces: what is looked up, its gradient, what the head starts from, and the gradient of that.
        pipe=4 * 2 * gather_seconds(gpu, cut.residual, stages, stride),
        flops=6 * cut.tokens * D * V,
    )
    return work + cut.memory(trainer.logit_bytes * cut.tokens * V + 2 * trainer.sum_bytes * V * D)


@cache
def layer_parameters(model: ModelConfig) -> float:
    """Weights of one layer."""
    counts = parameter_counts(model, padded=True)
    return sum(counts[name] for name in BLOCK_PARAMETERS) / model.num_layers


def table_parameters(model: ModelConfig) -> int:
    """Weights of embedding and head."""
    counts = parameter_counts(model, padded=True)
    return counts["word_embedding"] + counts["head"]
