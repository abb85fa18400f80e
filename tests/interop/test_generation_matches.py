"""Imported models of every family continue prompts with the same tokens as transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megajax.inference.sample import Options, continue_prompts
from megajax.inference.sampling import Sampling
from megajax.inference.trained import load_model
from megajax.interop.hf.transfer import import_model

pytestmark = pytest.mark.needs("torch", "transformers")

NAMES = ["gpt2", "llama", "llama-3.1", "mistral", "qwen2", "qwen3", "mixtral", "qwen2-moe", "gemma2", "gemma3", "bloom"]
PROMPTS = ["3 4 5 6 7", "11", "20 21 22", "48 30 30 31 7 7 40"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    """Ragged prompts together here, one by one there; any of several end tokens ends a row."""
    from tests.interop import references

    reference = references.reference(name)
    import_model(references.saved(reference, tmp_path / "source"), tmp_path / "run")
    for words in ([], ["parallel.tensor=2", "parallel.data=2"]):
        trained = load_model(tmp_path / "run", words=words)
        assert len(trained.end_ids) == 2, "the model's own, and that of the tokenizer of plain ids"
        for made in continue_prompts(trained, PROMPTS, Options(tokens=9, sampling=Sampling(temperature=0))):
            tokens, scores = generated(reference, made.prompt_ids, trained.end_ids)
            assert list(made.ids) == tokens
            np.testing.assert_allclose(made.log_probabilities, scores, rtol=1e-3, atol=1e-4)


def generated(reference: Any, prompt: tuple[int, ...], end_ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """What transformers puts after a prompt, and the log-probability of each token."""
    import torch

    encoded = reference.config.is_encoder_decoder
    # transformers' cache takes encoders to be as deep as decoders
    start = {"decoder_start_token_id": 0, "use_cache": False} if encoded else {}
    with torch.no_grad():
        out = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=9,
            do_sample=False, eos_token_id=list(end_ids), pad_token_id=0, return_dict_in_generate=True,
            output_logits=True, **start,
        )  # fmt: skip
    tokens = out.sequences[0, 1 if encoded else len(prompt) :].tolist()
    scores = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(out.logits, tokens, strict=True)]
    return tokens, scores


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "t5-1.1"])
def test_encoder_and_decoder(name: str, tmp_path: Path) -> None:
    """Prompts go through the encoder once; the decoder begins with its own first token."""
    from tests.interop import references

    reference = references.reference(name)
    import_model(references.saved(reference, tmp_path / "source"), tmp_path / "run")
    for words in ([], ["parallel.tensor=2", "parallel.data=2"]):
        trained = load_model(tmp_path / "run", words=words)
        for made in continue_prompts(trained, PROMPTS, Options(tokens=9, sampling=Sampling(temperature=0))):
            tokens, scores = generated(reference, made.prompt_ids, trained.end_ids)
            assert list(made.ids) == tokens
            np.testing.assert_allclose(made.log_probabilities, scores, rtol=1e-3, atol=1e-4)
