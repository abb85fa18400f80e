"""`python -m bench.tokenising`: preprocessing, compared with the tokenizer libraries in a bare loop.

The bare loop of processes gets texts that were cut beforehand, hands each process its share and calls the library on as
much text at a time as preprocessing does; ids are returned as lists and dropped. Preprocessing reads JSON, tokenizes,
writes token files and merges them. Both are timed from an idle machine to the last token, processes included, and take
turns; the best time counts. Memory is the peak of the resident sets of all processes together, each counted in full.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import sentencepiece
import tokenizers

from megajax.corpus.readers import read_documents
from megajax.data.tokenizers import train_sentencepiece

ROOT = Path(__file__).parents[1]
BATCH = 1 << 18
PIECES = 8192
MEMORY_LIMIT = 500 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Print two tables; 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.tokenising")
    parser.add_argument("--data", type=Path, default=ROOT / "configs" / "data" / "shakespeare.jsonl")
    parser.add_argument("--megabytes", type=int, default=50, help="of input, made by repeating the data")
    parser.add_argument("--memory-megabytes", type=int, default=0, help="of input for the peak of memory; 0 = the same")
    parser.add_argument("--memory-seconds", type=float, default=600, help="after which that run is cut off")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        flags = make_tokenizers(args.data, Path(directory))
        corpus = repeat(args.data, Path(directory) / "corpus.jsonl", args.megabytes << 20)
        seconds = {name: compare(corpus, name, flags[name], args.workers, args.rounds) for name in flags}
        if args.memory_megabytes:
            corpus = repeat(args.data, corpus, args.memory_megabytes << 20)
        peaks = {name: peak_memory(corpus, flags[name], args.workers, args.memory_seconds) for name in flags}
        return report(seconds, peaks, args.workers, corpus.stat().st_size)


def make_tokenizers(data: Path, directory: Path) -> dict[str, list[str]]:
    """Train both kinds on the data; the flags that preprocessing takes them by."""
    texts = list(read_documents([data]))
    train_sentencepiece(texts, directory / "pieces.model", PIECES)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.model.save(str(directory))
    vocab, merges = str(directory / "vocab.json"), str(directory / "merges.txt")
    return {
        "gpt2_bpe": ["--tokenizer-type", "gpt2_bpe", "--vocab-file", vocab, "--merge-file", merges],
        "sentencepiece": ["--tokenizer-type", "sentencepiece", "--tokenizer-model", str(directory / "pieces.model")],
    }


def repeat(data: Path, path: Path, size: int) -> Path:
    """Write the data again and again until there is enough of it."""
    content = data.read_bytes()
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(content)
    return path


def compare(corpus: Path, name: str, flags: list[str], workers: int, rounds: int) -> tuple[float, float]:
    """Return the best seconds of the bare loop and of preprocessing."""
    bare, ours = [], []
    for _ in range(rounds):
        bare.append(bare_loop(corpus, name, flags, workers))
        start = time.perf_counter()
        subprocess.run(preprocessing(corpus, flags, workers), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        ours.append(time.perf_counter() - start)
    return min(bare), min(ours)


def preprocessing(corpus: Path, flags: list[str], workers: int) -> list[str]:
    """Return the command line."""
    command = [sys.executable, "-m", "megajax.preprocess", "--input", str(corpus), "--output-prefix"]
    return [*command, str(corpus.with_name("out")), "--workers", str(workers), *flags]


def bare_loop(corpus: Path, name: str, flags: list[str], workers: int) -> float:
    """Return the seconds in which some processes encode all texts."""
    batches: list[list[str]] = [[]]
    size = 0
    for line in corpus.open():
        text = json.loads(line)["text"]
        batches[-1].append(text)
        size += len(text)
        if size >= BATCH:
            batches.append([])
            size = 0
    start = time.perf_counter()
    context = multiprocessing.get_context("fork")  # which has the texts without being sent them
    shares = [context.Process(target=encode_all, args=(batches[i::workers], name, flags)) for i in range(workers)]
    for process in shares:
        process.start()
    for process in shares:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - start


def encode_all(batches: list[list[str]], name: str, flags: list[str]) -> None:
    """Call the library, as its documentation does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if name == "sentencepiece":
        pieces = sentencepiece.SentencePieceProcessor(model_file=flags[-1])
        for batch in batches:
            pieces.encode(batch, num_threads=1)
        return
    bpe = tokenizers.ByteLevelBPETokenizer(flags[-3], flags[-1])._tokenizer
    for batch in batches:
        for encoding in bpe.encode_batch_fast(batch):
            encoding.ids  # noqa: B018 - the list is made when asked for


def peak_memory(corpus: Path, flags: list[str], workers: int, seconds: float) -> tuple[int, bool]:
    """Return the most bytes that all processes of a run held at a time, and whether it came to its end."""
    process = psutil.Popen(preprocessing(corpus, flags, workers), cwd=ROOT, stdout=subprocess.DEVNULL)
    timer = threading.Timer(seconds, process.terminate)
    timer.start()
    peak = 0
    while process.poll() is None:
        try:
            family = [process, *process.children(recursive=True)]
            peak = max(peak, sum(member.memory_info().rss for member in family))
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.05)
    timer.cancel()
    return peak, process.returncode == 0


def report(
    seconds: dict[str, tuple[float, float]], peaks: dict[str, tuple[int, bool]], workers: int, memory_bytes: int
) -> int:
    """Print what was measured."""
    failed = 0
    print(f"{workers} processes         bare s   ours s   ratio")
    for name, (bare, ours) in seconds.items():
        print(f"{name:18s} {bare:9.2f} {ours:8.2f} {bare / ours:7.2f}   (target: 0.90)")
        failed |= bare / ours < 0.9
    print(f"input {memory_bytes / 1e6:,.0f} MB     peak MiB")
    for name, (peak, complete) in peaks.items():
        print(f"{name:18s} {peak / 2**20:9.0f} {'' if complete else '(cut off)'}   (target: {MEMORY_LIMIT >> 20})")
        failed |= peak > MEMORY_LIMIT
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
