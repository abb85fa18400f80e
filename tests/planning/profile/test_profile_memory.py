"""Memory of programs written by hand: 1 MiB an array, unless its name says more."""

import pytest

from megajax.planning.hlo import Program
from megajax.planning.profile.memory import Memory

MIB = 2**20
ONE, TWO = "f32[262144]", "f32[524288]"


def memory(entry: str, *computations: str) -> Memory:
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return Memory(Program.of("\n".join(("HloModule hand", *computations, "ENTRY %main () -> f32[] {", lines, "}"))))


def held(found: Memory) -> tuple[float, list[str]]:
    """MiB at the peak, and the names of what is held there."""
    return found.peak.bytes / MIB, sorted(array.instruction.name for array in found.peak.held)


def test_an_array_lives_until_its_last_use():
    """While c is made, a is needed no more; b and c are held. Arguments and results are not temporary."""
    found = memory(f"""
        %p = {ONE} parameter(0)
        %a = {ONE} add(%p, %p)
        %b = {TWO} concatenate(%a, %a)
        %c = {TWO} add(%b, %b)
        %d = {ONE} slice(%c), slice={{[0:262144]}}
        ROOT %result = {ONE} copy(%d)
    """)
    assert held(found) == (4, ["b", "c"])
    assert [size / MIB for _, size in found.moments()] == [0, 1, 3, 4, 3, 1]


def test_views_have_no_memory_of_their_own():
    """A tuple keeps what it holds, and of a tuple only the entry that is used."""
    found = memory(f"""
        %p = {ONE} parameter(0)
        %a = {ONE} add(%p, %p)
        %b = {TWO} concatenate(%a, %a)
        %t = ({ONE}, {TWO}) tuple(%a, %b)
        %first = {ONE} get-tuple-element(%t), index=0
        %v = {ONE} bitcast(%first)
        ROOT %result = {ONE} copy(%v)
    """)
    assert [size / MIB for _, size in found.moments()] == [0, 1, 3, 3, 1, 1, 1]


def test_what_a_loop_carries_is_held_once_and_its_body_holds_more():
    """The carry of 2 MiB lives around the loop; inside, a turn holds 1 MiB besides, and updates a slice in place."""
    body = f"""
%body (c: (s32[], {TWO})) -> (s32[], {TWO}) {{
  %c = (s32[], {TWO}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %stack = {TWO} get-tuple-element(%c), index=1
  %cut = {ONE} dynamic-slice(%stack, %n), dynamic_slice_sizes={{262144}}
  %more = {ONE} sine(%cut)
  %new = {TWO} dynamic-update-slice(%stack, %more, %n)
  ROOT %next = (s32[], {TWO}) tuple(%n, %new)
}}

%condition (c.1: (s32[], {TWO})) -> pred[] {{
  %c.1 = (s32[], {TWO}) parameter(0)
  ROOT %less = pred[] constant(true)
}}
"""
    found = memory(
        f"""
        %zero = s32[] parameter(0)
        %start = {TWO} iota(), iota_dimension=0
        %carry = (s32[], {TWO}) tuple(%zero, %start)
        %loop = (s32[], {TWO}) while(%carry), condition=%condition, body=%body
        %last = {TWO} get-tuple-element(%loop), index=1
        ROOT %result = {TWO} copy(%last)
        """,
        body,
    )
    assert held(found) == (4, ["cut", "more", "start"])


def test_a_fusion_that_updates_a_slice_writes_into_its_operand():
    fused = f"""
%fused (a: {TWO}, b: {ONE}, n: s32[]) -> {TWO} {{
  %a = {TWO} parameter(0)
  %b = {ONE} parameter(1)
  %n = s32[] parameter(2)
  ROOT %new = {TWO} dynamic-update-slice(%a, %b, %n)
}}
"""
    found = memory(
        f"""
        %n = s32[] parameter(0)
        %stack = {TWO} iota(), iota_dimension=0
        %piece = {ONE} iota(), iota_dimension=0
        %put = {TWO} fusion(%stack, %piece, %n), kind=kLoop, calls=%fused
        ROOT %result = {TWO} copy(%put)
        """,
        fused,
    )
    assert held(found) == (3, ["piece", "stack"])


@pytest.mark.parametrize(
    ("type_", "start", "done"),
    [
        (ONE, "all-reduce", "bitcast"),
        (ONE, "all-reduce-start", "all-reduce-done"),  # as older versions of XLA write it
        (f"(({ONE}), {ONE})", "all-reduce-start", "all-reduce-done"),
    ],
)
def test_a_sum_over_devices_takes_over_the_memory_of_what_is_summed(type_, start, done):
    """Unless that is needed later."""
    lines = f"""
        %p = {ONE} parameter(0)
        %part = {ONE} add(%p, %p)
        %start = {type_} {start}(%part), to_apply=%add
        %sum = {ONE} {done}(%start)
        ROOT %result = {ONE} add(%sum, LAST)
    """
    assert held(memory(lines.replace("LAST", "%sum")))[0] == 1
    assert held(memory(lines.replace("LAST", "%part"))) == (2, ["part", "start"])


def test_what_is_sent_is_read_until_it_has_arrived():
    """While the kernel runs, the piece and the whole are held."""
    found = memory(f"""
        %p = {ONE} parameter(0)
        %piece = {ONE} add(%p, %p)
        %start = (({ONE}), {TWO}) all-gather-start(%piece), dimensions={{0}}
        %kernel = {ONE} add(%p, %p)
        %whole = {TWO} all-gather-done(%start)
        %both = {TWO} concatenate(%kernel, %kernel)
        ROOT %result = {TWO} add(%whole, %both)
    """)
    assert [size / MIB for _, size in found.moments()] == [0, 1, 3, 4, 4, 5, 4]


def test_each_result_of_a_kernel_lives_until_its_own_last_use():
    """The second of two results is dropped while the first, which is the program's, stays."""
    found = memory(
        f"""
        %p = {ONE} parameter(0)
        %two = ({ONE}, {TWO}) fusion(%p), kind=kInput, calls=%nothing
        %first = {ONE} get-tuple-element(%two), index=0
        %second = {TWO} get-tuple-element(%two), index=1
        %sum = f32[] reduce(%second, %p)
        ROOT %result = {ONE} bitcast(%first)
    """,
        """
%nothing (p: f32[1]) -> f32[1] {
  ROOT %p = f32[1] parameter(0)
}
""",
    )
    assert [round(size / MIB) for _, size in found.moments()] == [0, 2, 2, 2, 2, 0]


def test_a_branch_that_hands_an_array_on_makes_the_other_write_into_it():
    """The sums of 2 MiB go through both branches; the dear one makes 1 MiB besides, and the flag is new."""
    branches = f"""
%add (c: ({TWO}, {ONE})) -> ({TWO}, {ONE}) {{
  %c = ({TWO}, {ONE}) parameter(0)
  %sums = {TWO} get-tuple-element(%c), index=0
  %one = {ONE} get-tuple-element(%c), index=1
  %gradient = {ONE} sine(%one)
  %new = {TWO} pad(%sums, %gradient)
  ROOT %both = ({TWO}, {ONE}) tuple(%new, %gradient)
}}

%skip (d: ({TWO}, {ONE})) -> ({TWO}, {ONE}) {{
  %d = ({TWO}, {ONE}) parameter(0)
  %same = {TWO} get-tuple-element(%d), index=0
  %zero = {ONE} iota(), iota_dimension=0
  ROOT %kept = ({TWO}, {ONE}) tuple(%same, %zero)
}}
"""
    found = memory(
        f"""
        %taken = pred[] parameter(0)
        %sums = {TWO} iota(), iota_dimension=0
        %one = {ONE} iota(), iota_dimension=0
        %given = ({TWO}, {ONE}) tuple(%sums, %one)
        %choice = ({TWO}, {ONE}) conditional(%taken, %given, %given), true_computation=%add, false_computation=%skip
        %after = {TWO} get-tuple-element(%choice), index=0
        %flag = {ONE} get-tuple-element(%choice), index=1
        ROOT %result = {TWO} add(%after, %flag)
        """,
        branches,
    )
    # After the branches: the sums, in their old place, and the new flag.
    assert [size / MIB for _, size in found.moments()][-3:] == [3, 3, 3]
    assert found.peak.bytes / MIB == 4
