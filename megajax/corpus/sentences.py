"""Text into sentences, for BERT."""

from __future__ import annotations

from collections.abc import Callable

from megajax.corpus.readers import optional


def sentence_splitter() -> Callable[[str], list[str]]:
    """Return what cuts an English text into sentences without the white space between them.

    The rules are Punkt's (Kiss and Strunk 2006), as in Megatron-LM, with abbreviations learned from other text.

    Raises:
        InputError: nupunkt is not installed.
    """
    return optional("nupunkt", "splitting sentences").sentences
