"""`python -m megajax.evaluate RUN_DIR --task wikitext103 --data FILE [parallel.tensor=2 ...]`: score a trained model.

wikitext103 and lambada are defined as in Megatron-LM, so that numbers compare with published ones; jsonl-perplexity is
the plain perplexity of documents. Nothing is written into the run's directory, and the model may lie on any mesh.
`megajax.inference.tasks.harness` connects lm-evaluation-harness.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from megajax.cluster.detect import require_one_process
from megajax.config import InputError
from megajax.config.cli import OneLineParser, entry_point
from megajax.inference.tasks.documents import Documents, evaluate_documents
from megajax.inference.tasks.lambada import Lambada, evaluate_lambada
from megajax.inference.tasks.scoring import Scorer
from megajax.inference.tasks.wikitext import WikiText, evaluate_wikitext
from megajax.inference.trained import TrainedModel, load_model

TASKS = ("wikitext103", "lambada", "jsonl-perplexity")
OVERLAP = 32
"""Stride of overlapping windows on WikiText in tokens, which is Megatron-LM's default."""

Result = WikiText | Lambada | Documents


@entry_point
def main(argv: list[str]) -> None:
    """Run the command line; print the numbers on stdout and all remarks on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", force=True)
    require_one_process("evaluation")
    args = _parser().parse_intermixed_args(argv)
    trained = load_model(args.run_dir, args.step, args.words, purpose=f"--task {args.task}", writes=("continuation",))
    result = evaluate(
        trained, args.task, args.data,
        overlapping_eval=args.overlapping_eval, strict=args.strict_lambada, batch_size=args.batch_size,
    )  # fmt: skip
    print(json.dumps(numbers(result)) if args.json else result.line())


def evaluate(
    trained: TrainedModel,
    task: str,
    data: Path,
    *,
    overlapping_eval: int | None = None,
    strict: bool = False,
    batch_size: int = 8,
) -> Result:
    """Score a model on a task.

    Args:
        trained: decoder to be scored, loaded from a run.
        task: name of the task, one of `TASKS`.
        data: path of the task's data, such as wiki.test.tokens or a JSON Lines file.
        overlapping_eval: stride of overlapping windows in tokens; None for the task's default.
        strict: whether lambada asks for the whole last word instead of the last token.
        batch_size: number of windows that run together.

    Raises:
        InputError: an option does not go with the task, or the file is not what is needed.
    """
    if strict and task != "lambada":
        raise InputError(f"--strict-lambada goes with --task lambada, not {task}")
    if overlapping_eval is not None and task == "lambada":
        raise InputError("--overlapping-eval goes with long texts, not with --task lambada")
    scorer = Scorer(trained, batch_size)
    match task:
        case "wikitext103":
            stride = min(OVERLAP, trained.config.data.seq_length) if overlapping_eval is None else overlapping_eval
            return evaluate_wikitext(trained, data, scorer, stride)
        case "lambada":
            return evaluate_lambada(trained, data, scorer, strict)
        case "jsonl-perplexity":
            return evaluate_documents(trained, data, scorer, overlapping_eval)
    raise InputError(f"--task {task} is none of {', '.join(TASKS)}")


def numbers(result: Result) -> dict[str, Any]:
    """Return the numbers of a result by name."""
    extra = {"accuracy": result.accuracy} if isinstance(result, Lambada) else {}
    return result._asdict() | extra


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m megajax.evaluate", description="Score a trained model on a task.", allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "run_dir", metavar="RUN_DIR", help="directory of a run, which is output_dir of a training or --out of an import"
    )
    add(
        "words",
        nargs="*",
        metavar="KEY=VALUE",
        help="values for layout, precision and length, such as parallel.tensor=2",
    )
    add("--task", required=True, choices=TASKS, help="task to score the model on")
    add(
        "--data",
        required=True,
        type=Path,
        metavar="FILE",
        help="wiki.test.tokens, or a JSON Lines file with the key text",
    )
    add(
        "--overlapping-eval", type=int, metavar="N",
        help=f"move windows on by N tokens (default: {OVERLAP} for wikitext103, no overlap for jsonl-perplexity)",
    )  # fmt: skip
    add("--strict-lambada", action="store_true", help="ask lambada for the whole last word instead of the last token")
    add("--batch-size", type=int, default=8, metavar="N", help="number of windows that run together (default: 8)")
    add("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    add("--json", action="store_true", help="print the numbers as one JSON record")
    return parser


if __name__ == "__main__":
    sys.exit(main())
