"""`pytest -k planner_published -s`: memory predicted `--like megatron` next to what others measured, row by row."""

from statistics import median

from tests.planning.published import published

RULE_6C = ("7B t4 H100", "7B p4 v8 H100", "15B t8 H100")
MISSES = {
    "BLOOM": "too little by up to 16 %: nvidia-smi also counts DeepSpeed's buckets, and what PyTorch's allocator lost "
    "to fragmentation in 2022, of which FRAGMENTATION, from later runs, covers a part",
    "nanotron": "all five are ZeRO-1 with stages, whose update holds more than 12 bytes a parameter over the replicas; "
    "on 64 nodes (128 replicas) the figure leaves no room for the last stage's logits, so is of the first",
}
"""Nothing is fitted: frameworks differ by what their code holds (the practices in `published`)."""


def test_planner_published() -> None:
    rows = published()
    print(f"\n{'source':<12} {'run':<40}{'predicted':>10}{'measured':>10}{'error':>8}")
    for row in rows:
        miss = "" if abs(row.error) <= 0.1 else "  miss"
        print(f"{row.source:<12} {row.name:<40}{row.predicted:>10.2f}{row.measured:>10.2f}{row.error:>+8.1%}{miss}")
    hits = [row for row in rows if abs(row.error) <= 0.1]
    print(f"{len(hits)} of {len(rows)} within 10 %, median error {median(abs(row.error) for row in rows):.1%}; misses:")
    for source, why in MISSES.items():
        print(f"{source}: {why}")
    assert {row.source for row in rows if row not in hits} == set(MISSES)
    assert all(abs(row.error) <= 0.05 for row in rows if row.name in RULE_6C)
    assert len(hits) >= 60
    assert median(abs(row.error) for row in rows) < 0.08
