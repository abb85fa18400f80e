"""Time of one layer, and of embedding, head and loss, for one microbatch on one device.

At every matrix product of a layer the residual stream enters or leaves the tensor-parallel region by one all-gather or
reduce-scatter over `tensor` (2205.05198, figure 5), or, without sequence parallelism, by half an all-reduce, which
takes as long. With `parallel.whole_heads` no activation is summed around the attention: its input is gathered and its
output is cut. The experts of a mixture are computed again in the backward pass under every `train.remat`.

Shapes: T tokens of a micro batch on a device, D embed, F mlp, V padded vocabulary, R rows of an expert's block.
"""

from __future__ import annotations

from functools import cache

from megajax.costs.device import lookups
from megajax.models.families import model_class
from megajax.planning.cut import Core, Cut, Product, cores, experts, products, rows_of
from megajax.planning.operations import (
    LAUNCH,
    WIDTH,
    Work,
    attention_seconds,
    beside,
    gather_seconds,
    matmul_seconds,
    memory_seconds,
    total,
)

KERNELS = 3
"""Number of elementwise kernels around a matrix product, forward."""
BACKWARD_TRAFFIC = 1.5
"""Memory traffic of an elementwise operation's backward pass, relative to its forward pass."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of fused attention's backward pass relative to its forward pass: five products against two (2205.14135)."""


@cache
def layer_work(cut: Cut) -> tuple[Work, Work]:
    """Return the forward and backward work of one layer and microbatch."""
    trainer, gpu = cut.trainer, cut.gpu
    core, core_back = (
        total(_forward_core(cut, c) for c in cores(cut)),
        total(_backward_core(cut, c) for c in cores(cut)),
    )
    mixture, mixture_back = _mixture(cut)
    sums = trainer.sum_bytes / cut.fsdp + (4 if trainer.fp8 else 0)  # a cast reads 16 bits and writes 8, done twice
    forward = total(_forward(cut, product) for product in products(cut)) + core + cut.memory(cut.copied) + mixture
    backward = total(_backward(cut, product) for product in products(cut)) + core_back + _repeated(cut) + mixture_back
    backward += cut.memory(cut.copied + sums * cut.held)
    width, inner = WIDTH[cut.numbers], cut.tensor * cut.context
    gather = gather_seconds(gpu, width * cut.held, cut.fsdp, inner * cut.expert)
    # The gradient of every microbatch is summed over `context` and, for weights that all experts share, over `expert`;
    # Megatron-LM counts these shards as replicas.
    shared = cut.weights.replicated_over_expert(cut.tensor, cut.whole_heads)
    part = width / cut.fsdp  # the part that is left after the scatter over `fsdp`
    over_context = 2 * gather_seconds(gpu, part * cut.held, cut.context, cut.tensor) if trainer.scans_layers else 0
    over_expert = 2 * gather_seconds(gpu, part * shared, cut.expert, inner) if trainer.scans_layers else 0
    keys = 2 * width * cut.samples * cut.sequence * cut.kv_heads * cut.model.head_size
    round_trip = gather_seconds(gpu, keys, cut.context, cut.tensor)
    hidden = trainer.hides_neighbours
    forward += Work(
        context=beside(round_trip, core.seconds if hidden else 0, round_trip / cut.context),
        fsdp=beside(gather, forward.computing),
    )
    backward += Work(
        context=beside(2 * round_trip, core_back.seconds if hidden else 0, 2 * round_trip / cut.context)
        + beside(over_context, backward.computing),
        fsdp=beside(2 * gather, backward.computing),
        expert=beside(over_expert, backward.computing),
    )
    return forward, backward


def _forward(cut: Cut, product: Product) -> Work:
    rows, k, n = rows_of(cut, product).forward, product.k, product.n
    seconds = matmul_seconds(cut.gpu, rows, k, n, cut.products)
    there = product.encoded or (product.whole and not (product.enters and cut.sequence_parallel))
    border = 0.0 if there else _border(cut, product)
    return Work(
        matmul=seconds,
        memory=memory_seconds(cut.gpu, product.traffic) + KERNELS * LAUNCH,
        tensor=beside(border, seconds if cut.trainer.hides_tensor == "all" else 0, border / cut.tensor),
        flops=2 * rows * k * n,
    )


def _backward(cut: Cut, product: Product) -> Work:
    """Return the work of a product's two gradients.

    The gradient of the input needs the whole gradient of the output; nothing waits for the gradient of the weights.
    """
    rows, k, n = rows_of(cut, product), product.k, product.n
    dx = matmul_seconds(cut.gpu, rows.of_input, n, k, cut.products)
    dw = matmul_seconds(cut.gpu, k, rows.of_weights, n, cut.products)
    hides, border = cut.trainer.hides_tensor, _border(cut, product)
    piece = border / cut.tensor
    if product.whole:
        summed = 2 * cut.border(WIDTH[cut.numbers] * k * n) if cut.sequence_parallel else 0  # gradient of the weights
        tensor = summed + (0 if product.enters or not cut.sequence_parallel else border)
    elif product.enters:
        # The input is gathered for the gradient of the weights.
        again = border if cut.sequence_parallel and not product.encoded else 0
        tensor = beside(border, 0 if hides == "nothing" else dw, piece) + beside(again, dx)
    else:
        tensor = beside(border, dx if hides == "all" else 0, piece)
    return Work(
        matmul=dx + dw,
        memory=BACKWARD_TRAFFIC * (memory_seconds(cut.gpu, product.traffic) + KERNELS * LAUNCH),
        tensor=tensor,
        flops=2 * (rows.of_input + rows.of_weights) * k * n,
    )


def _border(cut: Cut, product: Product) -> float:
    return cut.border(cut.stream * product.rows / cut.tokens)


def _forward_core(cut: Cut, core: Core) -> Work:
    width, scores = cut.model.head_size, core.scores
    if cut.kernel == "cudnn":
        once = 2 * scores * width
        return Work(attention=attention_seconds(cut.gpu, once), flops=once)
    return _scores(cut, core) + _values(cut, core)


def _scores(cut: Cut, core: Core) -> Work:
    """Return the work of scores and softmax; a batched product fills the GPU like one large product."""
    scores, width = core.scores, cut.model.head_size
    product = matmul_seconds(cut.gpu, scores / core.keys, width, core.keys, cut.numbers)
    return Work(matmul=product, flops=2 * scores * width + core.bias) + cut.memory(cut.trainer.score_bytes[0] * scores)


def _values(cut: Cut, core: Core) -> Work:
    scores, width = core.scores, cut.model.head_size
    product = matmul_seconds(cut.gpu, scores / core.keys, core.keys, width, cut.numbers)
    return Work(matmul=product, flops=2 * scores * width)


def _backward_core(cut: Cut, core: Core) -> Work:
    if cut.kernel == "cudnn":
        back = BACKWARD_ATTENTION * 2 * core.scores * cut.model.head_size
        return Work(attention=attention_seconds(cut.gpu, back), flops=back)
    once = _scores(cut, core).matmul + _values(cut, core).matmul
    memory = cut.memory(cut.trainer.score_bytes[1] * core.scores)
    return Work(matmul=2 * once, flops=8 * core.scores * cut.model.head_size) + memory


def _repeated(cut: Cut) -> Work:
    """Return the work that the backward pass repeats, without that of a mixture's experts."""
    if cut.remat == "none":
        return Work()
    core = total(_forward_core(cut, c) for c in cores(cut))
    made = products(cut)
    again = [product for product in made if cut.repeats(product.makes)]
    if not cut.trainer.scans_layers:
        repeated = total(_forward(cut, product) for product in (again if cut.kept else made))
        return repeated + (core if cut.kernel != "cudnn" or "attention_out" not in cut.kept else Work())
    # Norms and activation are not among the named activations, nor are the softmax statistics of a fused kernel.
    elementwise = sum(p.traffic for p in made if p not in again and p.makes != "attention_residual")
    if cut.kernel != "cudnn" and "attention_out" in cut.kept:
        core = total(_scores(cut, c) for c in cores(cut))
    return total(_forward(cut, product) for product in again) + cut.memory(elementwise) + core


def _mixture(cut: Cut) -> tuple[Work, Work]:
    """Return the work of router and experts, forward and backward, their repeated forward included.

    Inputs of a device's experts are gathered over `tensor` and `expert` and their outputs scattered, which nothing
    hides; the backward pass gathers both inputs and gradients of outputs (see `parallel.experts`). Sums over blocks are
    fp32.
    """
    found = experts(cut)
    if found is None:
        return Work(), Work()
    model, gpu, D, gates = cut.model, cut.gpu, cut.model.hidden_size, 2 if cut.model.gated else 1
    R, F, width, blocks = found.rows, found.units, WIDTH[cut.numbers], found.matrices
    matmul = lambda m, k, n: blocks * matmul_seconds(gpu, m, k, n, cut.products)  # noqa: E731
    first, second = matmul(R, D, gates * F), matmul(R, F, D)
    flops = 2 * blocks * R * D * F
    router = 2 * cut.own_tokens * D * model.experts
    rows = blocks * R * (2 * width * D + 8 * D)  # rows are taken out, and added to the sums
    active = blocks * R * width * (gates + 1) * F
    sums = 8 * found.tokens * D  # sums start from zeros and are cast
    matrices = (cut.trainer.sum_bytes or 10) * blocks * (gates + 1) * D * F
    tensor = cut.border(cut.stream)
    expert = gather_seconds(gpu, cut.expert * cut.stream, cut.expert, cut.tensor * cut.context)
    again = 1 if cut.sequence_parallel else 0
    forward = Work(matmul=first + second, tensor=2 * tensor, expert=2 * expert, flops=(gates + 1) * flops + router)
    backward = Work(
        matmul=first + matmul(R, D, F) + matmul(F, R, D) + matmul(D, R, gates * F) + matmul(R, gates * F, D),
        tensor=(2 + again) * tensor,
        expert=3 * expert,
        flops=(gates + 2 * (gates + 1)) * flops + (2 if cut.remat == "none" else 3) * router,
    )
    launches = Work(memory=KERNELS * LAUNCH * blocks)
    outputs = launches + cut.memory(5 * cut.residual + rows + active + sums)
    backward += launches * 2 + cut.memory(7 * cut.residual + 2 * (rows + active + sums) + matrices)
    if cut.repeats_experts:  # its inputs are gathered in any case
        backward += outputs + Work(matmul=first + second, tensor=tensor, expert=expert, flops=(gates + 1) * flops)
    return forward + outputs, backward


@cache
def vocabulary_work(cut: Cut, stages: int, stride: int) -> Work:
    """Return the work of embedding, head and loss of one microbatch, forward and backward, on a device that takes part.

    Args:
        cut: share of the device.
        stages: number of pipeline stages that compute it together.
        stride: distance in devices to the same device of the next stage.
    """
    trainer, gpu, D = cut.trainer, cut.gpu, cut.model.hidden_size
    V = cut.model.padded_vocab_size / (cut.tensor * stages)
    shapes = ((cut.tokens, D, V), (cut.tokens, V, D), (D, cut.tokens, V))
    matmul = sum(matmul_seconds(gpu, m, k, n, cut.numbers) for m, k, n in shapes)
    # All tables are gathered over `fsdp` in the compute dtype, and their gradients scattered in fp32.
    inner = cut.tensor * cut.context
    table = gather_seconds(gpu, 4 * V * D, cut.fsdp, inner * cut.expert)
    uses = lookups(cut.model) + 1
    shards = uses * 2 * gather_seconds(gpu, 4 * V * D, cut.expert, inner)  # gradients, summed
    transform = matmul_seconds(gpu, cut.own_tokens, D, D, cut.numbers) * model_class(cut.model).head_transform
    encoded = cut.stream * cut.encoded / cut.sequence  # T5's encoder input, looked up as well
    work = Work(
        matmul=matmul + 3 * transform,
        tensor=4 * cut.border(cut.stream) + 3 * cut.border(encoded),
        fsdp=beside(uses * (WIDTH[cut.numbers] / 4 + 1) * table, matmul),
        expert=beside(shards, matmul),
        # All-reduces: embeddings, their gradient, the input of the head, and its gradient.
        pipe=4 * 2 * gather_seconds(gpu, cut.residual, stages, stride),
        flops=6 * cut.tokens * D * V + _small_products(cut),
    )
    return work + cut.memory(trainer.logit_bytes * cut.tokens * V + 2 * trainer.sum_bytes * V * D)


def _small_products(cut: Cut) -> float:
    """Return the FLOPs, forward and backward, of all products besides embedding, layers and output matrix.

    They are few: BERT's transform of every token, its pooler and two classes for a pair's first token, token types as a
    product with one-hot rows, which need no gradient, and the gradient of T5's bias by distance, for all layers at
    once.
    """
    model, D = cut.model, cut.model.hidden_size
    transform = cut.own_tokens * D * D * model_class(model).head_transform
    pair = cut.samples * D * (D + 2) * model.pair_task
    types = cut.own_tokens * model.token_types * D
    places = (cut.sequence**2 + cut.encoded**2) * (model.positions == "relative")
    return 6 * (transform + pair) + 4 * types + 2 * places * model.relative_buckets * cut.heads
