"""`pytest -k planner_step_time -s`: predicted step times next to what others measured, row by row."""

from collections.abc import Sequence
from statistics import median

from tests.planning.held_out_steps import held_out
from tests.planning.published_steps import Row, published

MISSES = {
    "README GPT 24x2048": "so small that what surrounds the model counts (data, logging, Python), which is left out",
    "README GPT 48x7168": "micro batch not published: +41 % with 1, +18 % with 2 as here, +7 % with 4, as the "
    "reduction of gradients over one network card hides behind one microbatch",
    "dgxc Llama3.1-405B fp8": "the head, in 16 bits on the last stage, is predicted to hold up the others by 7 %; "
    "likely it was balanced",
    "dgxc Grok-1": "two releases of the same run, 16.93 and 21.01 s, and no experts in MegaJAX: predicted as a dense "
    "model with as many FLOPs, so without the exchange of tokens",
    "dgxc Llama2-70B MaxText fp8": "casts to fp8 count as passes through memory; XLA likely fuses most",
    "dgxc Llama3-70B MaxText fp8": "the same",
    "dgxc GPT3-175B Paxml fp8": "to gather a layer takes as long as to compute it in fp8; likely less of it was hidden",
    "Toolbox GPT-5B Pax": "XLA of 2023 likely passed over the fp32 scores more often than it does now",
    "AXLearn": "third-party table; two runs of one program, one predicted too fast and one too slow",
}
"""Why rows are off by more than 10 %, by the beginning of their names."""


def errors(rows: Sequence[Row]) -> list[float]:
    """Relative errors, positive if the prediction is too slow; prints the table."""
    print(f"\n{'source':<9}{'program':<9} {'run':<36}{'GPU':<11}{'predicted':>9}{'measured':>9}{'error':>8}  limit")
    found = []
    for row in rows:
        time = row.predicted
        error = time.seconds / row.measured - 1
        found.append(error)
        print(f"{row.source:<9}{row.program:<9} {row.name:<36}{row.gpu.name:<11}", end="")
        miss = "  miss" if abs(error) > 0.1 else ""
        print(f"{time.seconds:>9.3f}{row.measured:>9.3f}{error:>+8.1%}  {time.limit}{miss}")
    sizes = [abs(error) for error in found]
    print(f"{len(rows)} rows: median error {median(sizes):.1%}, worst {max(sizes):.1%}")
    return found


def test_planner_step_time() -> None:
    """All published step times of A100s and H100s, with one set of constants per GPU."""
    rows = published()
    found = errors(rows)
    for name, why in MISSES.items():
        print(f"{name}: {why}")
    for program in ("megatron", "JAX"):
        part = [abs(error) for row, error in zip(rows, found, strict=True) if row.program == program]
        print(f"{program}: {len(part)} rows, median {median(part):.1%}, worst {max(part):.1%}")
    assert len(rows) == 92
    assert median(map(abs, found)) <= 0.10
    assert max(map(abs, found)) <= 0.25
    missed = {f"{row.source} {row.name}" for row, error in zip(rows, found, strict=True) if abs(error) > 0.1}
    assert all(any(name.startswith(known) for known in MISSES) for name in missed)


def test_planner_step_time_of_what_no_constant_was_set_with() -> None:
    """Other runs, programs and GPUs, mostly predicted too fast: DeepSpeed, PyTorch FSDP and tests are not tuned."""
    found = errors(held_out())
    assert median(map(abs, found)) <= 0.15
    assert max(map(abs, found)) <= 0.35
