"""Collectives read from compiled programs whose traffic is known by construction."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from megajax.planning.collectives import PLACES, Collective, collectives

ROWS = P("data", "tensor")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 1, 4), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def read(mesh, f, spec=ROWS):
    """Collectives of `f` on each device's block, [4, 4] unless `spec` says otherwise, of an fp32 array [8, 16]."""
    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False))
    traffic = collectives(run.lower(jax.ShapeDtypeStruct((8, 16), jnp.float32)).compile(), mesh)
    return [(c.op, c.axes, c.count, c.bytes, c.shape, c.dtype, c.loop, c.conditional) for c in traffic]


def program(call):
    return f"HloModule m\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n  ROOT %r = {call}\n}}\n"


def block(op, axes, shape=(4, 4), loop=(), conditional=False):
    return (op, axes, prod(loop), 4 * prod(shape), shape, "f32", loop, conditional)


def test_all_reduce_over_one_axis(mesh):
    assert read(mesh, lambda x: lax.psum(x, "tensor")) == [block("all-reduce", ("tensor",))]


def test_axes_of_size_one_are_not_named(mesh):
    assert read(mesh, lambda x: lax.psum(x, ("fsdp", "data"))) == [block("all-reduce", ("data",))]


def test_all_reduce_over_two_axes(mesh):
    assert read(mesh, lambda x: lax.psum(x, ("tensor", "data"))) == [block("all-reduce", ("data", "tensor"))]


def test_all_gather_counts_its_result(mesh):
    found = read(mesh, lambda x: lax.all_gather(x, "tensor", axis=1, tiled=True))
    assert found == [block("all-gather", ("tensor",), (4, 16))]


def test_reduce_scatter_counts_its_operand(mesh):
    found = read(mesh, lambda x: lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True), P("data"))
    assert found == [block("reduce-scatter", ("tensor",), (4, 16))]


def test_permutation(mesh):
    assert read(mesh, lambda x: lax.ppermute(x, "data", [(0, 1)])) == [block("collective-permute", ("data",))]


def test_all_to_all_in_pieces_is_one_tensor(mesh):
    found = read(mesh, lambda x: lax.all_to_all(x, "tensor", 1, 0, tiled=True), P("tensor"))
    assert found == [block("all-to-all", ("tensor",), (4, 2, 4))]


def test_several_tensors_in_one_call_count_each(mesh):
    found = read(mesh, lambda x: lax.psum((x, x[0]), "tensor"))
    assert found == [block("all-reduce", ("tensor",)), block("all-reduce", ("tensor",), (4,))]


def test_nested_loops_multiply(mesh):
    def inner(x, _):
        return lax.psum(x, "tensor") / 2, None

    def outer(x, _):
        return lax.ppermute(lax.scan(inner, x, length=3)[0], "data", [(0, 1), (1, 0)]), None

    found = read(mesh, lambda x: lax.scan(outer, x, length=5)[0])
    assert sorted(found) == [
        block("all-reduce", ("tensor",), loop=(5, 3)),
        block("collective-permute", ("data",), loop=(5,)),
    ]


def test_branches_are_marked(mesh):
    def either(x):
        return lax.cond(lax.pmax(x[0, 0], ("data", "tensor")) > 0, lambda x: lax.psum(x, "data"), lambda x: x, x)

    assert sorted(read(mesh, either)) == [
        block("all-reduce", ("data",), conditional=True),
        block("all-reduce", ("data", "tensor"), shape=()),
    ]


def test_loop_without_known_length_is_refused(mesh):
    def forever(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: lax.psum(x, "tensor"), x)

    with pytest.raises(ValueError, match="communicates an unknown number of times"):
        read(mesh, forever)


def test_mesh_of_another_size_is_refused(mesh):
    with pytest.raises(ValueError, match="runs on 8 devices, the mesh has 4"):
        collectives(program("f32[8] all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}"), AbstractMesh((4,), ("x",)))


def test_gradient_of_a_scan_has_a_forward_and_a_backward(mesh):
    """Column- then row-parallel matmul, the sum over `tensor` written out: one all-reduce each way and layer."""

    @jax.custom_vjp
    def replicate(x):
        return x

    replicate.defvjp(lambda x: (x, None), lambda _, dy: (lax.psum(dy, "tensor"),))

    @jax.custom_vjp
    def reduce(x):
        return lax.psum(x, "tensor")

    reduce.defvjp(lambda x: (reduce(x), None), lambda _, dy: (dy,))

    def loss(x, up, down):
        layer = lambda x, w: (reduce(jnp.tanh(replicate(x) @ w[0]) @ w[1]), None)  # noqa: E731
        return lax.scan(layer, x, (up, down))[0].sum()

    specs = (P("data"), P(None, None, "tensor"), P(None, "tensor"))
    step = jax.jit(
        jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    )
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (3, 16, 32), (3, 32, 16))]
    layers = collectives(step.lower(*arrays).compile(), mesh).over("tensor").inside(3)
    assert layers.forward().count("all-reduce") == layers.backward().count("all-reduce") == 3
    assert len(layers.of_at_least(4 * 16 * 4)) == 2
    assert len(layers.of_at_least(4 * 16 * 4 + 1)) == 0
    assert layers.total_bytes() == 6 * 4 * 16 * 4


def test_table(mesh):
    total = jax.shard_map(lambda x: lax.psum(x, "tensor"), mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    twice = jax.jit(lambda x: lax.scan(lambda x, _: (total(x), None), x, length=2)[0])
    compiled = twice.lower(jax.ShapeDtypeStruct((512, 1024), jnp.float32)).compile()
    assert str(collectives(compiled, mesh)).splitlines() == [
        "count  op          axes    tensor        MiB each    MiB  loops",
        "    2  all-reduce  tensor  f32[256,256]     0.250  0.500  2",
    ]


NODES = AbstractMesh((2, 2, 8), ("data", "fsdp", "tensor"))
EIGHTS = "{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15},{16,17,18,19,20,21,22,23},{24,25,26,27,28,29,30,31}}"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (EIGHTS, ("tensor",)),
        ("{}", ("data", "fsdp", "tensor")),
        ("[1,32]<=[32]", ("data", "fsdp", "tensor")),
        ("[4,8]<=[32]", ("tensor",)),
        ("[16,2]<=[2,2,8]T(0,2,1)", ("fsdp",)),
        ("[16,2]<=[2,16]T(1,0)", ("data",)),
        ("[8,4]<=[4,8]T(1,0)", ("data", "fsdp")),
        ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=8] {'axis_1'}", ("data", "fsdp")),
        ("mesh['pipe'=1,'data'=2,'fsdp'=2,'tensor'=8] {'data','tensor'}", ("data", "tensor")),
        ("mesh['axis_0'=1,'axis_1'=8,'axis_2'=4], device_ids=([4,8]T(1,0)) {'axis_1'}", ("tensor",)),
        ("mesh['axis_0'=2,'axis_1'=16], device_ids=([2,2,8]T(1,0,2)) {'axis_0'}", ("fsdp",)),
        ("mesh['axis_0'=4,'axis_1'=8] {'axis_0':(1)2}", ("data",)),
        ("mesh['axis_0'=4,'axis_1'=8] {'axis_0':(2)2,'axis_1':(2)4}", ("fsdp", "tensor")),
    ],
)
def test_spellings_of_device_groups(groups, axes):
    (found,) = collectives(program(f"f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"), NODES)
    assert found == Collective("all-reduce", axes, (8,), "f32", (), False, "")


@given(st.data())
def test_every_spelling_names_the_same_axes(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=3, max_size=4))
    order = data.draw(st.permutations(range(len(sizes))))
    ways = data.draw(st.integers(0, len(sizes)))
    kept, grouped = order[:ways], order[ways:]
    names = [f"axis_{i}" for i in range(len(sizes))]
    groups = np.arange(prod(sizes)).reshape(sizes).transpose(order).reshape(prod(sizes[i] for i in kept), -1)
    numbers = lambda items: ",".join(map(str, items))  # noqa: E731
    in_order = ",".join(f"'{names[i]}'={sizes[i]}" for i in range(len(sizes)))
    permuted = ",".join(f"'{names[i]}'={sizes[i]}" for i in order)
    inside = ",".join(f"'{names[i]}'" for i in grouped)
    spellings = [
        "{" + ",".join("{" + numbers(group) + "}" for group in groups) + "}",
        f"[{numbers(groups.shape)}]<=[{numbers(sizes)}]T({numbers(order)})",
        f"mesh[{in_order}] {{{inside}}}",
        f"mesh[{permuted}], device_ids=([{numbers(sizes)}]T({numbers(order)})) {{{inside}}}",
        f"mesh[{permuted}], device_ids=({numbers(groups.ravel())}) {{{inside}}}",
    ]
    mesh = AbstractMesh(tuple(sizes), tuple(names))
    for spelling in spellings:
        (found,) = collectives(program(f"f32[8]{{0}} all-reduce(%x), replica_groups={spelling}"), mesh)
        assert found.axes == tuple(names[i] for i in sorted(grouped) if sizes[i] > 1), spelling


@pytest.mark.parametrize(
    ("call", "op", "shapes", "size"),
    [
        ("(bf16[2,1]{1,0}, bf16[2,8]{1,0}) all-gather-start(%x)", "all-gather", [(2, 8)], 32),
        ("((bf16[2,1]), bf16[2,8]{1,0:S(1)}) all-gather-start(%x)", "all-gather", [(2, 8)], 32),
        (
            "((s32[1]{0}, /*index=1*/s32[2]{0}), (s32[8]{0}, s32[16]{0})) all-gather-start(%x, /*index=1*/%y)",
            "all-gather",
            [(8,), (16,)],
            96,
        ),
        ("f32[] all-reduce-start(%x)", "all-reduce", [()], 4),
        ("(f32[3]{0}, f32[5]{0}) all-reduce-start(%x, %y)", "all-reduce", [(3,), (5,)], 32),
        ("((f32[3]{0}), f32[3]{0}) all-reduce-start(%x)", "all-reduce", [(3,)], 12),
        ("((f8e4m3fn[8,2]), f8e4m3fn[1,2]) reduce-scatter-start(%x), dimensions={0}", "reduce-scatter", [(8, 2)], 16),
        ("(pred[4], pred[4], u32[], u32[]) collective-permute-start(%x)", "collective-permute", [(4,)], 4),
    ],
)
def test_started_collectives(call, op, shapes, size):
    """A start names operands and results (and on some platforms its context); the done that follows counts nothing."""
    groups = "source_target_pairs={{0,1},{1,0}}" if op == "collective-permute" else f"replica_groups={EIGHTS}"
    text = program(f"f32[8] {op}-done(%start)").replace("  ROOT", f"  %start = {call}, {groups}\n  ROOT")
    traffic = collectives(text, NODES)
    assert [(c.op, c.axes, c.shape) for c in traffic] == [(op, ("tensor",), shape) for shape in shapes]
    assert traffic.total_bytes() == size


def test_wrapped_in_an_asynchronous_computation_and_moved_into_a_loop():
    text = """HloModule m, is_scheduled=true

%async (p: f32[8,4]) -> f32[1,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %rs = f32[1,4]{1,0} reduce-scatter(%p), replica_groups=[4,8]<=[32], dimensions={0}, to_apply=%add
}

%cond (s: (s32[], f32[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (s: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %start = ((f32[8,4]{1,0}), f32[1,4]{1,0}, u32[]) async-start(%x), calls=%async, metadata={op_name="jit(f)/elsewhere"}
  %done = f32[1,4]{1,0} async-done(%start), calls=%async
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%j, %y)
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]{1,0}) while(%t), condition=%cond, body=%body, metadata={op_name="jit(f)/transpose(jvp())/while"}, backend_config={"known_trip_count":{"n":"24"}}
  ROOT %r = f32[8,4]{1,0} get-tuple-element(%w), index=1
}
"""  # noqa: E501
    (found,) = collectives(text, NODES)
    source = "jit(f)/transpose(jvp())/while/body"
    assert found == Collective("reduce-scatter", ("tensor",), (8, 4), "f32", (24,), False, source)
    assert found.count == 24


STEP = "jit(step)/microbatches/while"
BACKWARD = f"{STEP}/body/transpose(jvp(layers))/while"
SUM = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"


def named(origin: str) -> str:
    return f'metadata={{op_name="{origin}"}}'


def test_places_in_a_step_that_xla_rearranged():
    """A sum that XLA moved out of the loop over microbatches and named after it, or left the name that it had inside;
    a loop that lost its name, as an iteration was peeled off; a sum in that iteration, joined of others and nameless;
    one that XLA made in the loop itself; and two joined, of the iteration and of the head, with both their names."""
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    both = f"{STEP}/body/(transpose(jvp(layers))/while/psum:jvp()/psum)"
    text = f"""HloModule m

%cond (s: f32[2]) -> pred[] {{
  ROOT %less = pred[] compare(%s, %n), direction=LT
}}

%layers (s: f32[2]) -> f32[2] {{
  %s = f32[2] parameter(0)
  %x = f32[2] negate(%s), {named(f"{BACKWARD}/body/mul")}
  ROOT %r = f32[2] all-reduce(%s), {SUM}
}}

%microbatch (s: f32[2]) -> f32[2] {{
  %s = f32[2] parameter(0)
  %w = f32[2] while(%s), condition=%cond, body=%layers, {trips}
  %x = f32[2] negate(%w), {named(f"{BACKWARD}/body/mul")}
  %b = f32[4] bitcast(%x)
  %joined = f32[4] all-reduce(%b), {SUM}
  %head = f32[8] all-reduce(%joined), {SUM}, {named(f"{STEP}/body/jvp()/psum")}
  %two = (f32[3], f32[5]) all-reduce(%l, %h), {SUM}, {named(both)}
  ROOT %moved = f32[16] all-reduce(%w), {SUM}, {named(BACKWARD)}
}}

ENTRY %main (x: f32[2]) -> f32[2] {{
  %x = f32[2] parameter(0)
  %w = f32[2] while(%x), condition=%cond, body=%microbatch, {trips}, {named(STEP)}
  %sum = f32[32] all-reduce(%w), {SUM}, {named(STEP)}
  %other = f32[64] all-reduce(%w), {SUM}, {named(f"{STEP}/body/add")}
  ROOT %done = f32[128] all-reduce(%w), {SUM}, {named("jit(step)/add")}
}}
"""
    found = {c.shape[0]: c.place for c in collectives(text, AbstractMesh((8,), ("tensor",)))}
    assert found == {
        2: "layers backward",
        3: "layers backward",
        4: "layers backward",
        5: "each microbatch",
        8: "each microbatch",
        16: "each microbatch",
        32: "each step",
        64: "each step",
        128: "each step",
    }


@pytest.mark.parametrize(("layers", "rest"), [(3, 0), (1, 0), (3, 1)])
@pytest.mark.parametrize(("loop", "microbatches"), [("microbatches", 2), ("steady_ticks", 1)])
def test_places_are_named_by_scopes(mesh, loop: str, microbatches: int, layers: int, rest: int):
    """Loops of a single iteration, which a compiled program has unrolled, are known all the same, and so are layers
    that run beside their loop.
    """

    def layer(x, w):
        return lax.psum(jnp.tanh(x * w), "tensor"), None

    def loss(w, x):
        with jax.named_scope("layers"):
            x = lax.scan(layer, x, w)[0]
            if rest:
                with jax.named_scope("rest"):
                    x, _ = layer(x, w[0])
        return lax.psum(x * x, "data").sum()

    def one(total, x):
        value, gradient = jax.value_and_grad(loss)(jnp.ones(layers), x)
        return total + value * gradient, None

    def step(xs):
        with jax.named_scope(loop):
            total, _ = lax.scan(one, jnp.zeros(layers), xs)
        return lax.psum(total, ("data", "tensor"))

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(None, "data"), out_specs=P(), check_vma=False))
    traffic = collectives(run.lower(jax.ShapeDtypeStruct((microbatches, 8, 16), jnp.float32)).compile(), mesh)
    counts = {place: sum(c.count for c in traffic if c.place == place) for place in PLACES}
    assert counts == {
        "layers forward": microbatches * (layers + rest),
        "layers backward": microbatches * (layers + rest),
        "each microbatch": microbatches,
        "each step": 1,
    }
