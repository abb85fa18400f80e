"""Prices of single instructions of an H100, worked out by hand from its data sheet and the shares that it reaches."""

import pytest
from jax.sharding import AbstractMesh

from megajax.costs.hardware import gpu_named
from megajax.planning.hlo import Program
from megajax.planning.profile.prices import Price, price

H100 = gpu_named("H100")
NODE = AbstractMesh((2, 8), ("data", "tensor"))
STREAM = 3.35e12 * 0.85
"""Bytes of device memory in a second."""
LAUNCH = 4e-6


def priced(line: str, *computations: str, parameters: str = "bf16[4096,4096]") -> Price:
    """Price one line, whose operands %p and %q have the type `parameters`."""
    text = "\n".join(
        (
            "HloModule hand",
            *computations,
            "ENTRY %main () -> f32[] {",
            f"  %p = {parameters} parameter(0)",
            f"  %q = {parameters} parameter(1)",
            "  %i = s32[] parameter(2)",
            f"  ROOT {line}",
            "}",
        )
    )
    program = Program.of(text)
    named = program.named(program.entry)
    return price(next(one for one in named.values() if one.root), named, program, H100, NODE)


def test_a_product_takes_as_long_as_its_flops():
    """2 * 4096^3 FLOPs; 512 tiles fill 132 multiprocessors but for half of the last wave, and k = 4096 but for 256."""
    found = priced("%dot = bf16[4096,4096] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}")
    full = 512 / (512 + 66) * 4096 / (4096 + 256)
    assert found.kind == "matmul"
    assert found.flops == 2 * 4096**3
    assert found.seconds == pytest.approx(2 * 4096**3 / (989.5e12 * 0.66 * full) + LAUNCH)
    assert found.bytes == 3 * 2 * 4096**2


def test_a_product_of_a_library_call_and_in_a_fusion_are_the_same_work():
    dims = '"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]'
    config = f'{{"gemm_backend_config":{{"dot_dimension_numbers":{{{dims}}}}}}}'
    call = f'%gemm = bf16[4096,4096] custom-call(%p, %q), custom_call_target="__cublas$gemm", backend_config={config}'
    fused = """
%fused (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096] parameter(0)
  %b = bf16[4096,4096] parameter(1)
  ROOT %dot = bf16[4096,4096] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    one = priced(call)
    two = priced("%fusion = bf16[4096,4096] fusion(%p, %q), kind=kCustom, calls=%fused", fused)
    assert one == two
    assert one.flops == 2 * 4096**3


def test_products_in_8_bits_are_faster():
    line = "%dot = bf16[4096,4096] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    half, fp8 = priced(line), priced(line, parameters="f8e4m3fn[4096,4096]")
    assert (half.seconds - LAUNCH) / (fp8.seconds - LAUNCH) == pytest.approx(1979 * 0.58 / (989.5 * 0.66))


def test_a_batch_of_products_counts_all_of_them():
    line = "%dot = bf16[8,64,64] dot(%p, %q), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}"
    assert priced(line, parameters="bf16[8,64,64]").flops == 8 * 2 * 64**3


def test_an_elementwise_kernel_takes_as_long_as_its_bytes():
    found = priced("%sum = bf16[4096,4096] add(%p, %q)")
    assert (found.kind, found.bytes) == ("memory", 3 * 2 * 4096**2)
    assert found.seconds == pytest.approx(3 * 2 * 4096**2 / STREAM + LAUNCH)


SLICED = """
%fused (a: f32[48,1024], n: s32[]) -> f32[1,1024] {
  %a = f32[48,1024] parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %cut = f32[1,1024] dynamic-slice(%a, %n, %zero), dynamic_slice_sizes={1,1024}
}
"""
UPDATED = """
%fused (a: f32[48,1024], b: f32[48,1024], n: s32[]) -> f32[48,1024] {
  %a = f32[48,1024] parameter(0)
  %b = f32[48,1024] parameter(1)
  %n = s32[] parameter(2)
  %zero = s32[] constant(0)
  %cut = f32[1,1024] dynamic-slice(%b, %n, %zero), dynamic_slice_sizes={1,1024}
  ROOT %new = f32[48,1024] dynamic-update-slice(%a, %cut, %n, %zero)
}
"""


def test_a_kernel_reads_and_writes_slices_alone():
    """A slice of 4 KiB is read and written, whatever it is cut out of or put into; the index has 4 bytes."""
    stack = "f32[48,1024]"
    cut = priced("%fusion = f32[1,1024] fusion(%p, %i), kind=kLoop, calls=%fused", SLICED, parameters=stack)
    put = priced("%fusion = f32[48,1024] fusion(%p, %q, %i), kind=kLoop, calls=%fused", UPDATED, parameters=stack)
    bare = priced("%cut = f32[1,1024] dynamic-slice(%p, %i, %i)", parameters=stack)
    assert cut.bytes == put.bytes == 2 * 4096 + 4
    assert bare.bytes == 2 * 4096


@pytest.mark.parametrize(
    ("op", "groups", "axes", "seconds"),
    [
        ("all-gather", "[2,8]<=[16]", ("tensor",), 15e-6 + 2**20 * 7 / 8 / (450e9 * 0.82)),
        ("all-reduce", "[2,8]<=[16]", ("tensor",), 2 * (15e-6 + 2**20 * 7 / 8 / (450e9 * 0.82))),
        # Of eight pieces a device sends seven, as in a reduce-scatter of the same array.
        ("all-to-all", "[2,8]<=[16]", ("tensor",), 15e-6 + 2**20 * 7 / 8 / (450e9 * 0.82)),
        ("all-gather", "[16,1]<=[16]", (), 0.0),
        # One card for each pair of nodes' members; two nodes meet in one more step.
        ("all-gather", "[8,2]<=[2,8]T(1,0)", ("data",), 2 * 15e-6 + 2**20 / 2 / (50e9 * 0.85)),
    ],
)
def test_a_collective_takes_as_long_as_the_slowest_of_its_links(op, groups, axes, seconds):
    line = f"%c = f32[262144] {op}(%p), replica_groups={groups}, dimensions={{0}}, to_apply=%add"
    found = priced(line, parameters="f32[262144]")
    assert (found.kind, found.axes, found.bytes) == ("collective", axes, 2**20)
    assert found.seconds == pytest.approx(seconds)


def test_sends_to_neighbours_use_the_network_only_between_nodes():
    line = "%c = f32[262144] collective-permute(%p), source_target_pairs={{{}}}"
    ring = ",".join(f"{{{8 * node + i},{8 * node + (i + 1) % 8}}}" for node in range(2) for i in range(8))
    across = ",".join(f"{{{i},{(i + 8) % 16}}}" for i in range(16))
    inside, between = (
        priced(line.replace("{{{}}}", f"{{{pairs}}}"), parameters="f32[262144]") for pairs in (ring, across)
    )
    assert inside.seconds == pytest.approx(15e-6 + 2**20 / (450e9 * 0.82))
    assert between.seconds == pytest.approx(15e-6 + 2**20 / (50e9 * 0.85))


def test_collectives_in_one_kernel_are_all_paid_for():
    both = """
%both (a: f32[262144]) -> (f32[262144], f32[262144]) {
  %a = f32[262144] parameter(0)
  %x = f32[262144] all-reduce(%a), replica_groups=[2,8]<=[16], to_apply=%add
  %y = f32[262144] all-reduce(%a), replica_groups=[2,8]<=[16], to_apply=%add
  ROOT %t = (f32[262144], f32[262144]) tuple(%x, %y)
}
"""
    line = "%s = ((f32[262144]), (f32[262144], f32[262144])) async-start(%p), calls=%both"
    found = priced(line, both, parameters="f32[262144]")
    assert found.seconds == pytest.approx(4 * (15e-6 + 2**20 * 7 / 8 / (450e9 * 0.82)))
    assert found.bytes == 2 * 2**20


def test_a_scatter_writes_its_updates_alone():
    """16 rows of 4 KiB into a table, read, added and written; their 16 numbers are read."""
    fused = """
%fused (a: f32[48,1024], n: s32[16], b: f32[16,1024]) -> f32[48,1024] {
  %a = f32[48,1024] parameter(0)
  %n = s32[16] parameter(1)
  %b = f32[16,1024] parameter(2)
  ROOT %new = f32[48,1024] scatter(%a, %n, %b), to_apply=%add
}
"""
    found = priced("%f = f32[48,1024] fusion(%p, %q, %i), kind=kInput, calls=%fused", fused)
    assert found.bytes == 2 * 16 * 4096 + 16 * 4


def test_a_start_of_a_slice_is_the_slice():
    line = "%s = ((f32[48,1024], s32[], s32[]), f32[1,1024], u32[]) dynamic-slice-start(%p, %i, %i)"
    assert priced(line, parameters="f32[48,1024]").bytes == 2 * 4096


def test_copies_to_the_host_are_named():
    assert priced("%c = bf16[4096,4096]{1,0:S(5)} copy(%p)").unknown == "copy between GPU and host"


def test_what_is_not_known_is_named_and_never_free():
    new = priced("%x = bf16[4096,4096] quantum-leap(%p)")
    call = priced('%x = bf16[4096,4096] custom-call(%p), custom_call_target="somebody$kernel"')
    assert (new.unknown, call.unknown) == ("quantum-leap", "somebody$kernel")
    assert new.seconds == call.seconds == pytest.approx(2 * 2 * 4096**2 / STREAM + LAUNCH)


def test_views_are_free():
    for line in ("%v = bf16[4096,4096] bitcast(%p)", "%v = (bf16[4096,4096]) tuple(%p)"):
        assert priced(line) == Price("free", 0.0)
