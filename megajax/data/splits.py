"""Training, validation and test parts of one source: contiguous ranges of its documents, never shuffled.

Megatron-LM's `--split`: the tail of the file is what a model is validated and tested on.
"""

from __future__ import annotations

import math
import re

from megajax.config.base import InputError

SPLITS = ("train", "valid", "test")


def parse_split(text: str) -> dict[str, tuple[float, float] | None]:
    """Parse relative sizes such as "969,30,1" to the fraction of the documents where each split begins and ends.

    Splits of size 0 are None; sizes left out at the end are 0.
    """
    words = [word for word in re.split(r"[\s,/]+", text.strip()) if word]
    try:
        sizes = [float(word) for word in words]
    except ValueError:
        raise InputError(f"split {text!r}: not a list of numbers such as 969,30,1") from None
    if not 0 < len(sizes) <= len(SPLITS):
        raise InputError(f"split {text!r}: {len(sizes)} sizes; give one for each of {', '.join(SPLITS)}")
    total = sum(sizes)
    if any(not 0 <= size < math.inf for size in sizes) or total == 0:
        raise InputError(f"split {text!r}: sizes must be finite, not negative and not all 0")
    sizes += [0.0] * (len(SPLITS) - len(sizes))
    edges = [0.0]
    for size in sizes:
        edges.append(edges[-1] + size / total)
    return {
        name: (low, high) if low != high else None
        for name, low, high in zip(SPLITS, edges[:-1], edges[1:], strict=True)
    }


def document_range(bounds: tuple[float, float], documents: int) -> range:
    """Return the documents of a split: fractions of the count, rounded half to even as Python and Megatron do."""
    low, high = bounds
    return range(round(low * documents), round(high * documents))
