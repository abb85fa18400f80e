"""Programs written by hand, whose times are worked out by hand: kernels, what runs beside them, loops and branches."""

from fractions import Fraction

import pytest

from megajax.planning.hlo import Program
from megajax.planning.profile.prices import Price
from megajax.planning.profile.timeline import COLLECTIVES, COPIES, NEIGHBOURS, Timeline, play

TAIL = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def timeline(lines: str, *computations: str, unknown: int | None = None, share: Fraction = Fraction(1)) -> Timeline:
    """Play the lines of an entry computation, in which the number in a name is its seconds: `kernel_3.1`."""

    def price(line, computation):
        seconds = float(line.name.split("_")[1].split(".")[0]) if "_" in line.name else 0.0
        if not seconds or line.opcode.endswith("-done"):
            return Price("free", 0.0)
        if line.opcode.startswith(("all-gather", "collective-permute")):
            return Price("collective", seconds, axes=("tensor",))
        return Price("memory" if line.name.startswith(("bytes", "copy")) else "matmul", seconds)

    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    text = "HloModule hand\n" + "\n".join(computations) + TAIL + f"\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return play(Program.of(text), price, lambda source: share, unknown)


def times(played: Timeline) -> dict[str, tuple[float, float, float]]:
    """Return start, seconds and waited seconds by name."""
    return {span.instruction.name: (span.start, span.seconds, span.waited) for span in played.spans}


def test_kernels_follow_each_other():
    played = timeline("%kernel_2.1 = f32[8] copy(%p)\nROOT %kernel_3.2 = f32[8] copy(%kernel_2.1)")
    assert played.seconds == 5
    assert times(played) == {"kernel_2.1": (0, 2, 0), "kernel_3.2": (2, 3, 0)}


def test_a_collective_without_start_blocks():
    played = timeline("%g_2.1 = f32[8] all-gather(%p)\nROOT %kernel_3.2 = f32[8] copy(%g_2.1)")
    assert played.seconds == 5
    assert times(played) == {"g_2.1": (0, 2, 2), "kernel_3.2": (2, 3, 0)}


def test_a_long_kernel_hides_a_collective_and_loses_a_quarter_of_its_speed_beside_it():
    """3 s of the kernel: 2 s beside the collective do 1.5 of them, 1.5 more follow."""
    played = timeline("""
        %g_2.1 = (f32[8], f32[8]) all-gather-start(%p)
        %kernel_3.2 = f32[8] copy(%p)
        %g_2.3 = f32[8] all-gather-done(%g_2.1)
        ROOT %kernel_1.4 = f32[8] copy(%g_2.3)
    """)
    assert times(played) == {"g_2.1": (0, 2, 0), "kernel_3.2": (0, 3.5, 0), "kernel_1.4": (3.5, 1, 0)}
    assert played.seconds == 4.5


def test_a_short_kernel_hides_part_of_a_collective():
    """The kernel of 3 s takes 4 s beside it; 4 of its 8 s are waited for."""
    played = timeline("""
        %g_8.1 = (f32[8], f32[8]) all-gather-start(%p)
        %kernel_3.2 = f32[8] copy(%p)
        ROOT %g_8.3 = f32[8] all-gather-done(%g_8.1)
    """)
    assert times(played) == {"g_8.1": (0, 8, 4), "kernel_3.2": (0, 4, 0)}
    assert played.seconds == 8


def test_an_update_between_start_and_done_changes_nothing():
    played = timeline("""
        %g_4.1 = (f32[8], f32[8]) async-start(%p), calls=%all
        %g_4.2 = (f32[8], f32[8]) async-update(%g_4.1)
        ROOT %g_4.3 = f32[8] async-done(%g_4.2)
    """)
    assert (played.seconds, times(played)["g_4.1"]) == (4, (0, 4, 4))


def test_collectives_wait_for_each_other_and_sends_to_neighbours_do_not():
    lines = """
        %a_2.1 = (f32[8], f32[8]) all-gather-start(%p)
        %b_2.2 = (f32[8], f32[8]) KIND-start(%p)
        %a_2.3 = f32[8] all-gather-done(%a_2.1)
        ROOT %b_2.4 = f32[8] KIND-done(%b_2.2)
    """
    one, two = (timeline(lines.replace("KIND", kind)) for kind in ("all-gather", "collective-permute"))
    assert (one.seconds, two.seconds) == (4, 2)
    assert {span.queue for span in one.spans} == {COLLECTIVES}
    assert {span.queue for span in two.spans} == {COLLECTIVES, NEIGHBOURS}
    assert sum(span.waited for span in one.spans) == 4
    assert sum(span.waited for span in two.spans) == 2


def test_copies_beside_kernels_share_the_memory_with_those_that_wait_for_it():
    """Beside a product a copy costs nothing; two that are as long as their bytes take as long as both."""
    lines = """
        %copy_2.1 = ((f32[8]), f32[8], u32[]) fusion-start(%p), calls=%add
        %NAME_4.2 = f32[8] copy(%p)
        ROOT %copy_2.3 = f32[8] fusion-done(%copy_2.1)
    """
    product, stream = (timeline(lines.replace("NAME", name)) for name in ("kernel", "bytes"))
    assert product.seconds == 4
    assert stream.seconds == 6
    assert {span.queue for span in product.spans} >= {COPIES}


LOOP = """
%body (c: f32[8]) -> f32[8] {
  %c = f32[8] parameter(0)
  %g_1.9 = (f32[8], f32[8]) all-gather-start(%c)
  %done = f32[8] all-gather-done(%g_1.9)
  ROOT %kernel_2.9 = f32[8] copy(%done)
}

%condition (c.1: f32[8]) -> pred[] {
  %c.1 = f32[8] parameter(0)
  ROOT %less = pred[] constant(true)
}
"""
WHILE = "while(%p), condition=%condition, body=%body"
TRIPS = ', backend_config={"known_trip_count":{"n":"5"}}'


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    played = timeline(f"ROOT %loop = f32[8] {WHILE}{TRIPS}", LOOP)
    assert played.seconds == 15
    assert {span.times for span in played.spans} == {5}
    (loop,) = played.loops
    assert (loop.name, loop.start, loop.turn, loop.times) == ("loop", 3, 3, 4)


def test_turns_beside_a_flight_from_before_the_loop_are_played_one_by_one():
    """A copy of 4 s is over in the second turn of the loop, whose products it does not slow down."""
    played = timeline(
        f"""
        %copy_4.1 = ((f32[8]), f32[8], u32[]) fusion-start(%p), calls=%add
        %loop = f32[8] {WHILE}{TRIPS}
        ROOT %copy_4.3 = f32[8] fusion-done(%copy_4.1)
        """,
        LOOP,
    )
    assert played.seconds == 15
    assert sorted(span.times for span in played.spans if span.instruction.name == "kernel_2.9") == [1, 1, 3]
    assert times(played)["copy_4.1"][2] == 0


def test_a_loop_whose_turns_depend_on_data_is_named_unless_they_are_given():
    program = f"ROOT %loop = f32[8] {WHILE}"
    unknown, given = timeline(program, LOOP), timeline(program, LOOP, unknown=4)
    assert (unknown.seconds, dict(unknown.uncounted)) == (3, {"turns of loop loop": 1})
    assert (given.seconds, dict(given.uncounted)) == (12, {})


BRANCHES = """
%dear (c: f32[8]) -> f32[8] {
  %c = f32[8] parameter(0)
  ROOT %kernel_8.1 = f32[8] copy(%c)
}

%cheap (d: f32[8]) -> f32[8] {
  %d = f32[8] parameter(0)
  ROOT %kernel_1.1 = f32[8] copy(%d)
}
"""
CHOICE = "%choice = f32[8] conditional(%p, %p, %p), true_computation=%cheap, false_computation=%dear"


def test_a_branch_counts_by_the_share_of_the_times_that_it_is_taken():
    """The dear branch is taken once in four times: 8 / 4 + 1 * 3 / 4 s."""
    played = timeline(f"ROOT {CHOICE}", BRANCHES, share=Fraction(1, 4))
    assert played.seconds == 2.75
    assert {span.instruction.name: (span.times, span.seconds) for span in played.spans} == {
        "kernel_8.1": (0.25, 8),
        "kernel_1.1": (0.75, 1),
    }


def test_a_flight_over_a_branch_goes_on_for_the_time_that_the_branch_takes():
    """6 s beside 2.75 s of products, which take a third longer beside it; the rest is waited for."""
    played = timeline(
        f"""
        %g_6.1 = (f32[8], f32[8]) all-gather-start(%p)
        {CHOICE}
        ROOT %g_6.3 = f32[8] all-gather-done(%g_6.1)
        """,
        BRANCHES,
        share=Fraction(1, 4),
    )
    assert played.seconds == pytest.approx(6)
    assert times(played)["g_6.1"] == pytest.approx((0, 6, 6 - 2.75 / 0.75))


def test_the_dearest_branch_is_found_with_the_turns_of_its_loops():
    """50 turns of 1 s are dearer than 8 s."""
    looping = f"""
%looping (d: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %loop = f32[8] {WHILE}{TRIPS.replace("5", "50").replace("%c", "%p")}
}}
"""
    choice = CHOICE.replace("%cheap", "%looping")
    played = timeline(f"ROOT {choice}", BRANCHES, LOOP, looping, share=Fraction(1, 2))
    assert played.seconds == 8 / 2 + 50 * 3 / 2
    assert timeline(f"ROOT {choice}", BRANCHES, LOOP, looping).seconds == 150
