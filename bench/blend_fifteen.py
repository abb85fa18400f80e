"""`python -m bench.blend_fifteen`: MT-NLG's fifteen sources in a million samples: wanted and given shares.

The weights are those of Smith et al. (2022), "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B", table 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from megajax.data.blend import blend_order

MT_NLG = {
    "Books3": 0.14336, "RealNews": 0.08962, "OpenWebText2": 0.19336, "StackExchange": 0.05689, "CC-Stories": 0.00859,
    "PubMed abstracts": 0.02897, "Wikipedia": 0.04771, "Gutenberg PG-19": 0.00873, "BookCorpus2": 0.01007,
    "NIH ExPorter": 0.00208, "CC-2020-50": 0.13017, "Pile-CC": 0.09446, "CC-2021-04": 0.15652, "ArXiv": 0.01359,
    "GitHub": 0.01588,
}  # fmt: skip
TOLERANCE = 1e-3


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 if a share is off by more than 0.1 % of itself."""
    parser = argparse.ArgumentParser(prog="python -m bench.blend_fifteen")
    parser.add_argument("--samples", type=int, default=1_000_000)
    samples = parser.parse_args(argv).samples
    start = time.perf_counter()
    sources, numbers = blend_order(list(MT_NLG.values()), samples)
    seconds = time.perf_counter() - start
    given = np.bincount(sources, minlength=len(MT_NLG))
    wanted = np.array(list(MT_NLG.values())) / sum(MT_NLG.values())
    off = given / samples / wanted - 1
    print(f"{'source':<18}{'share':>9}{'samples':>10}{'given':>9}{'off by':>10}")
    for name, share, count, far in zip(MT_NLG, wanted, given, off, strict=True):
        print(f"{name:<18}{share:>9.5f}{count:>10,}{count / samples:>9.5f}{far:>10.4%}")
    in_order = all(np.array_equal(numbers[sources == k], np.arange(n)) for k, n in enumerate(given))
    print(f"{seconds:.2f} s, {seconds / samples * 1e6:.2f} us a sample; every source in order: {in_order}")
    return int(not (in_order and (np.abs(off) <= TOLERANCE).all()))


if __name__ == "__main__":
    sys.exit(main())
