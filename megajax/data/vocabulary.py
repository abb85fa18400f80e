"""Token files against the tokenizer that is to read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megajax.config.base import ConfigError


def check_vocabulary(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    """Refuse ids, read from the file `path`, that a vocabulary does not have."""
    for token in (int(tokens.max(initial=0)), int(tokens.min(initial=0))):
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{path}: token id {token} outside the vocabulary of {vocab_size}; "
                "the file was written with another tokenizer: set tokenizer.* to that one"
            )
