"""One device's share of a layer: its matrix products and attention cores, and the program that computes them.

A layer has four matrix products, with the attention core between the first two; if it attends to an encoder as well,
there are three more products and another core. At each of them the residual stream enters or leaves the tensor-parallel
region (2205.05198, figure 5). A mixture's experts replace the last two products, which remain for a shared MLP.

Shapes: B samples of a micro batch, S sequence, T = B S / context tokens of a device, D embed, N heads, K kv heads,
H head dim, F mlp, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megajax.config.config import Config
from megajax.config.model import ModelConfig
from megajax.config.train import ACTIVATION_NAMES
from megajax.costs.device import Device, expert_load
from megajax.costs.hardware import Gpu
from megajax.costs.memory import saved_per_layer
from megajax.costs.weights import LayerWeights, layer_weights
from megajax.models.families import batch_arrays
from megajax.models.model import Stack
from megajax.parallel.kernels import choose_attention
from megajax.planning.operations import WIDTH, Numbers, Work, gather_seconds, memory_seconds


@dataclass(frozen=True)
class Trainer:
    """A training program by the facts that matter for its time.

    `memory traffic` means bytes read and written in device memory.
    """

    name: str
    scans_layers: bool
    """Whether layers run in a `lax.scan` under `jax.checkpoint`, and otherwise as in PyTorch.

    In a scan, saved activations are copied into stacked arrays and out again; elementwise operations and fused
    attention are repeated, but never the last product of a block. In PyTorch nothing is copied, and only configured
    parts are repeated, or whole blocks in full recomputation.
    """
    shares_vocabulary: bool
    """Whether all pipeline stages compute embedding and head together; otherwise the first and the last stage do."""
    hides_tensor: Literal["nothing", "backward", "all"]
    """Matrix products behind which the collectives over `tensor` run.

    They are none, those of weight gradients (for which nothing waits), or all, in pieces.
    """
    hides_neighbours: bool
    """Whether communication with neighbours runs beside the computation.

    It sends keys and values round `context`, and activations of an interleaved pipeline to the next stage.
    """
    hides_data: bool
    """Whether communication over `data` runs beside the computation.

    It reduces gradients during the last backward passes, and gathers weights during the first forward passes.
    """
    gradient_bytes: int
    """Bytes of a gradient that is sent over `data`."""
    sum_bytes: int
    """Memory traffic of adding a weight's gradient for one microbatch to its sum; 0 = the matrix product adds it."""
    score_bytes: tuple[int, int]
    """Memory traffic of one attention score, forward and backward, if attention is not fused."""
    logit_bytes: int
    """Memory traffic of one logit, forward and backward, in head and loss."""
    fp8: bool = False
    """Whether matrix products of the blocks use fp8 (published runs do; MegaJAX does not yet)."""


MEGAJAX = Trainer(
    name="megajax",
    scans_layers=True,
    shares_vocabulary=True,
    hides_tensor="backward",
    hides_neighbours=False,
    hides_data=False,
    gradient_bytes=4,
    sum_bytes=10,
    score_bytes=(20, 24),
    logit_bytes=24,
)
"""Trainer of this repository.

To add a gradient, it reads bf16, and reads and writes fp32; scores and softmax are fp32.
"""

MEGATRON = Trainer(
    name="megatron",
    scans_layers=False,
    shares_vocabulary=False,
    hides_tensor="all",
    hides_neighbours=True,
    hides_data=True,
    gradient_bytes=4,
    sum_bytes=0,
    score_bytes=(8, 14),
    logit_bytes=48,
)
"""Trainer of Megatron-LM since core 0.8 with all its overlaps.

Gradient sums are fused, and 16-bit scores go through a fused softmax.
"""


@dataclass(frozen=True)
class Cut:
    """One device's share of a layer and the way in which it is computed.

    Layouts with the same share take the same time for it.
    """

    model: ModelConfig
    gpu: Gpu
    trainer: Trainer
    samples: int
    """Number of samples B in a micro batch."""
    sequence: int
    """Number of tokens S in a sample."""
    encoded: int
    """Number of tokens per sample of the encoder's output to which the layer attends; 0 = none."""
    tokens: float
    """Number of tokens T of a micro batch on this device."""
    encoded_tokens: float
    """Number of tokens of the encoder's output for a micro batch on this device."""
    heads: float
    """Number of query heads N on this device."""
    kv_heads: float
    """Number of key/value heads K on this device."""
    stream: float
    """Bytes of the residual stream [T, D], uncut over `tensor`."""
    stream_ways: int
    """Number of parts into which the residual stream is cut over `tensor`."""
    tensor: int
    context: int
    expert: int
    fsdp: int
    sequence_parallel: bool
    whole_heads: bool
    remat: str | tuple[str, ...]
    kernel: str
    """Kernel of the attention: "cudnn" is fused, and others pass the scores through memory."""
    numbers: Numbers
    """Numeric format of activations."""
    copied: float
    """Bytes that are copied in each direction to save a layer's activations."""

    @classmethod
    def of(cls, config: Config, mesh: Mapping[str, int], gpu: Gpu, trainer: Trainer, stack: Stack) -> Cut:
        """Return the share in a layer of a stack, for a configuration with a known vocabulary on a mesh.

        Raises:
            InputError: layers differ in what they hold.
        """
        device, copied = Device(config, mesh), 0.0
        if trainer.scans_layers:
            kernel = choose_attention(config, "gpu", batch_arrays(config.model, config.data)).name
            copied = _copied(config, mesh, stack)
        else:
            kernel = "xla" if config.train.attention == "xla" else "cudnn"
        return cls(
            model=config.model,
            gpu=gpu,
            trainer=trainer,
            samples=config.train.micro_batch_size,
            sequence=stack.sequence,
            encoded=stack.memory,
            tokens=device.tokens(stack.sequence),
            encoded_tokens=device.tokens(stack.memory),
            heads=device.heads,
            kv_heads=device.kv_heads,
            stream=device.stream(stack.sequence),
            stream_ways=device.stream_ways,
            tensor=mesh["tensor"],
            context=mesh["context"],
            expert=mesh["expert"],
            fsdp=mesh["fsdp"],
            sequence_parallel=config.parallel.sequence_parallel,
            whole_heads=config.parallel.whole_heads,
            remat=config.train.remat,
            kernel=kernel,
            numbers="fp32" if config.train.precision == "fp32" else "half",
            copied=copied,
        )

    @property
    def own_tokens(self) -> float:
        """Return the number of tokens whose residual stream lies on this device."""
        return self.tokens / self.stream_ways

    @property
    def residual(self) -> float:
        """Return the bytes of the residual stream on this device."""
        return self.stream / self.stream_ways

    @property
    def products(self) -> Numbers:
        """Return the numeric format of the blocks' matrix products."""
        return "fp8" if self.trainer.fp8 else self.numbers

    @property
    def weights(self) -> LayerWeights:
        """Return the weights of the layer on all devices together."""
        return layer_weights(self.model, crossed=self.encoded > 0)

    @property
    def held(self) -> float:
        """Return the number of weights of the layer with which this device computes."""
        return self.weights.on_device(self.tensor, self.expert, self.whole_heads)

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the names of the activations that are not computed again."""
        return kept_by(self.remat)

    def repeats(self, makes: str) -> bool:
        """Tell whether the backward pass computes an activation again, because it needs it and nothing has kept it."""
        return makes not in (*self.kept, LAST)

    @property
    def repeats_experts(self) -> bool:
        """Tell whether the backward pass needs a mixture's output, which is then computed once more."""
        return self.model.branch_norm and self.repeats("branch_output")

    def border(self, stream: float) -> float:
        """Return the seconds to gather or scatter a residual stream of `stream` bytes over `tensor`."""
        return gather_seconds(self.gpu, stream, self.tensor, 1)

    def memory(self, size: float) -> Work:
        """Return the work of reading and writing `size` bytes."""
        return Work(memory=memory_seconds(self.gpu, size))


def kept_by(remat: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the activations that a rematerialisation policy keeps."""
    if isinstance(remat, tuple):
        return remat
    return () if remat == "full" else ACTIVATION_NAMES


def _copied(config: Config, mesh: Mapping[str, int], stack: Stack) -> float:
    """Return the bytes that are read and written to copy a layer's activations into the stack of all layers, or back.

    Only inputs and outputs of matrix products and attention kernels, which are the named activations, are copied;
    others are computed in their places. With stages, all of them are copied through the ring as well.
    """
    saved = named = saved_per_layer(config, mesh, stack)
    if config.train.remat == "none":
        named = saved_per_layer(replace(config, train=replace(config.train, remat="selective")), mesh, stack)
    return (saved + named) * (1 if mesh["pipe"] == 1 else 2)


LAST = "output"
"""Output of a layer's last product if nothing normalises it, which no backward pass needs."""


def branch_ends(model: ModelConfig) -> tuple[str, str]:
    """Return the names of the activations in which attention and MLP end, LAST if no backward pass needs them."""
    if model.branch_norm:  # the backward pass of a norm needs its input
        return "branch_output", "branch_output"
    return "attention_residual", "mlp_residual" if model.norm_placement == "post" else LAST


class Product(NamedTuple):
    """A matrix product [rows, k] x [k, n] of the forward pass, and the elementwise operations around it."""

    makes: str
    """Name of the activation in which the product ends."""
    enters: bool
    """Whether its input is gathered over `tensor`; otherwise its output is scattered."""
    k: float
    n: float
    traffic: float
    """Bytes read and written by the elementwise operations."""
    rows: float
    """Number of rows: T, or the tokens of the encoder."""
    whole: bool = False
    """Whether every device along `tensor` has the whole matrix (`parallel.whole_heads`)."""
    encoded: bool = False
    """Whether its input is the encoder's output, which is gathered once for all layers."""


class Rows(NamedTuple):
    """The rows of the three matrix products that a device computes for one product of the model."""

    forward: float
    of_input: float
    """Number of rows in the product for the gradient of the input."""
    of_weights: float
    """Number of rows in the product for the gradient of the weights."""


def rows_of(cut: Cut, product: Product) -> Rows:
    """Return the rows of a product: all of them, unless heads are whole and tokens are spread over `tensor`.

    In that case queries, keys and values, and the gradient of attention's output, are computed for all tokens.
    Everything else is computed for each device's own tokens, so that the gradients of these weights are summed over
    `tensor`.
    """
    rows = product.rows
    if not (product.whole and cut.sequence_parallel):
        return Rows(rows, rows, rows)
    own = rows / cut.tensor
    return Rows(rows, own, own) if product.enters else Rows(own, rows, own)


def products(cut: Cut) -> tuple[Product, ...]:
    """Return the matrix products of a layer, in order, without those of a mixture's experts."""
    model, T, D, width = cut.model, cut.tokens, cut.model.hidden_size, WIDTH[cut.numbers]
    q, kv = cut.heads * model.head_size, cut.kv_heads * model.head_size
    norm, add = 2 * cut.residual, 3 * cut.residual
    rotate = 2 * width * T * (q + kv) if model.positions == "rope" else 0
    cast = 3 * T if cut.trainer.fp8 else 0  # per input: read 16 bits, write 8
    (first, last), add = branch_ends(model), add + norm * model.branch_norm
    made = [
        Product("qkv", True, D, q + 2 * kv, norm + rotate + cast * D, T, cut.whole_heads),
        Product(first, False, q, D, add + cast * q, T, cut.whole_heads),
    ]
    if cut.encoded:
        made += [
            Product("qkv", True, D, q, norm, T, cut.whole_heads),
            Product("qkv", True, D, 2 * q, 0, cut.encoded_tokens, cut.whole_heads, encoded=True),
            Product("attention_residual", False, q, D, add, T, cut.whole_heads),
        ]
    units = model.shared_ffn_size if model.experts else model.ffn_size
    if not units:
        return tuple(made)
    F, gates = units / cut.tensor, 2 if model.gated else 1
    activate = width * T * (gates + 1) * F
    return (
        *made,
        Product("mlp_hidden", True, D, gates * F, norm + cast * D, T),
        Product(last, False, F, D, activate + add + cast * F, T),
    )


class Core(NamedTuple):
    """The attention core on one device: scores of queries and keys, softmax, and weighted sum of values."""

    scores: float
    keys: int
    """Number of keys of a query."""
    bias: float
    """FLOPs of the bias by distance (T5), which is a product with one-hot rows."""


def cores(cut: Cut) -> tuple[Core, ...]:
    """Return the attention cores of a layer, in order."""
    relative = cut.model.positions == "relative"
    bias = 2 * cut.sequence**2 * cut.model.relative_buckets * cut.heads if relative else 0
    own = Core(cut.tokens * cut.sequence * cut.heads, cut.sequence, bias)
    return (own, Core(cut.tokens * cut.encoded * cut.heads, cut.encoded, 0)) if cut.encoded else (own,)


class Experts(NamedTuple):
    """The experts of a mixture on one device, for a microbatch with a balanced load."""

    number: float
    """Number of experts."""
    blocks: int
    """Number of blocks that each expert works through."""
    rows: int
    """Number of rows R in a block."""
    units: float
    """Number of hidden units of an expert on this device."""
    tokens: float
    """Number of tokens that the experts see, which are on all devices along `expert`."""

    @property
    def matrices(self) -> float:
        """Return the number of blocks of all experts."""
        return self.number * self.blocks


def experts(cut: Cut) -> Experts | None:
    """Return the experts of a layer, or None if the model is not a mixture."""
    model, tokens = cut.model, cut.tokens * cut.expert
    if not model.experts:
        return None
    load = expert_load(model, tokens)
    return Experts(model.experts / cut.expert, load.blocks, load.block_rows, model.expert_size / cut.tensor, tokens)
