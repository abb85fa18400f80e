"""`python -m bench.kill_preprocessing`: kill -9 at random moments, run again, and compare the bytes of the output.

Every other time only the workers are killed, so that the command itself has to report this and end with code 2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table; 1 if any output differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.kill_preprocessing")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--documents", type=int, default=60_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        results = kill_and_continue(Path(directory), args.kills, args.documents, args.workers, args.seed)
    print("after s  killed   exit  shards kept  same bytes")
    for seconds, whom, code, kept, same in results:
        print(f"{seconds:7.2f}  {whom:8s} {code:4d}  {kept:11d}  {'yes' if same else 'NO'}")
    return int(not all(same for *_, same in results))


def kill_and_continue(
    directory: Path, kills: int, documents: int, workers: int, seed: int
) -> list[tuple[float, str, int, int, bool]]:
    """Return for every kill: when, who was, exit code, shards that were finished, whether the output is the same."""
    rng = random.Random(seed)
    corpus = directory / "corpus.jsonl"
    with corpus.open("w") as file:
        for number in range(documents):
            text = " ".join(str(rng.randrange(1000)) for _ in range(number % 50))
            file.write(json.dumps({"text": text, "more": str(number % 1000)}) + "\n")
    start = time.perf_counter()
    _start(corpus, directory / "undisturbed", workers).wait()
    whole = time.perf_counter() - start
    results = []
    for number in range(kills):
        prefix = directory / str(number)
        whom = "workers" if number % 2 and workers > 1 else "group"
        seconds = rng.uniform(0.3, 1.0) * whole
        process = _start(corpus, prefix, workers)
        time.sleep(seconds)
        code = _kill(process, whom)
        kept = len(list(directory.glob(f"{number}_shards/*[!s].json")))
        again = _start(corpus, prefix, workers).wait()
        same = again == 0 and _digest(directory, prefix.name) == _digest(directory, "undisturbed")
        left_over = [Path(f"{prefix}_shards").exists(), *directory.glob(f".{number}_*")]
        same = same and not any(left_over) and code in (0, 2, -signal.SIGKILL)
        results.append((seconds, whom, code, kept, same))
    return results


def _start(corpus: Path, prefix: Path, workers: int) -> psutil.Popen:
    command = [sys.executable, "-m", "megajax.preprocess", "--input", str(corpus), "--output-prefix", str(prefix)]
    command += ["--json-keys", "text", "more", "--tokenizer-type", "null", "--vocab-size", "1000"]
    return psutil.Popen(
        [*command, "--workers", str(workers)],
        cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _kill(process: psutil.Popen, whom: str) -> int:
    try:
        if whom == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            for child in process.children():
                child.kill()
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass  # it had finished
    return process.wait()


def _digest(directory: Path, name: str) -> dict[str, str]:
    files = directory.glob(f"{name}_*.*")
    return {path.name.removeprefix(name): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    sys.exit(main())
