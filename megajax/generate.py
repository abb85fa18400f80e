"""`python -m megajax.generate RUN_DIR --prompt "..." [parallel.tensor=2 ...]`: let a trained model continue text.

Nothing is written into the run's directory. Only the weights of a checkpoint are read, onto one device or whatever mesh
the words ask for, in the precision that the run was trained in. A prompt becomes ids exactly as the training text did:
a beginning-of-sequence token stands before it if, and only if, one stood before that text; the names of special tokens
in it are text (with --special-tokens they are those tokens); and with --chat it is written as conversations were.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megajax.cluster.detect import require_one_process
from megajax.config import InputError
from megajax.config.cli import OneLineParser, entry_point
from megajax.corpus.chat import Message
from megajax.inference.sample import Continuation, Options, continue_prompts
from megajax.inference.sampling import Sampling
from megajax.inference.trained import Prompt, load_model

log = logging.getLogger(__name__)

WRITES = ("continuation", "answer")
"""Values of `Model.writes` that models which can generate text have."""


@entry_point
def main(argv: list[str]) -> None:
    """Run the command line; print continuations on stdout and all remarks on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", force=True)
    require_one_process("generation")
    args = _parser().parse_intermixed_args(argv)
    options = Options(
        tokens=args.tokens,
        sampling=Sampling(args.temperature, args.top_k, args.top_p),
        seed=args.seed,
        stop=tuple(args.stop),
        score_prompts=args.logprobs and args.echo,
        batch_size=args.batch_size,
    )
    prompts = [*args.prompt, *(_read_prompts(args.prompts_file) if args.prompts_file else ())]
    if not prompts:
        raise InputError("no prompt: give --prompt TEXT or --prompts-file FILE")
    _check_chat(args)
    writes = ("continuation",) if args.chat else WRITES
    trained = load_model(args.run_dir, args.step, args.words, "--chat" if args.chat else "generation", writes)
    if args.add_bos is not None:
        trained = trained.with_bos(args.add_bos)
    asked: Sequence[str | Prompt] = prompts
    if args.chat:
        trained = trained.for_chat()
        asked = [trained.chat(_messages(prompt, args.system)) for prompt in prompts]
    elif args.special_tokens:
        asked = [trained.marked(prompt) for prompt in prompts]
    for made in continue_prompts(trained, asked, options):
        start, ids = made.prompt[:30], made.prompt_ids
        log.info("%r (%d ids, from %s on) + %d (%s)", start, len(ids), list(ids[:8]), made.tokens, made.finish_reason)
        print(_line(made, args), flush=True)


def generate_text(
    run_dir: str | Path, prompts: Sequence[str], *, step: int | None = None, words: Sequence[str] = (), **options: Any
) -> list[Continuation]:
    """Continue prompts with the model of a run.

    The model is loaded at every call; `load_model` and `continue_prompts` load it only once.

    Args:
        run_dir: `output_dir` of the training.
        prompts: texts that the model continues, one continuation each.
        step: step of the checkpoint; None for the newest.
        words: `KEY=VALUE` words for layout and precision, such as `parallel.tensor=2`.
        options: fields of `inference.sample.Options`.
    """
    wanted = Options(**options)
    trained = load_model(run_dir, step, words, "generation", WRITES)
    return list(continue_prompts(trained, prompts, wanted))


def _check_chat(args: argparse.Namespace) -> None:
    """Refuse options that a chat template decides, and chats with a model that has no template."""
    if args.system is not None and not args.chat:
        raise InputError("--system is said in a chat: give --chat as well")
    if args.chat and (args.special_tokens or args.add_bos is not None):
        raise InputError("--chat writes a prompt as conversations were: leave --special-tokens and --add-bos out")


def _messages(prompt: str, system: str | None) -> list[Message]:
    """Read a conversation from a JSON list of messages, or take the text as the only message of the user."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    try:
        written = json.loads(prompt) if prompt.startswith("[") else None
    except ValueError:
        written = None
    if isinstance(written, list) and all(isinstance(message, dict) for message in written):
        return [*messages, *written]
    return [*messages, {"role": "user", "content": prompt}]


def _read_prompts(path: Path) -> Iterator[str]:
    """Read one prompt from each line: plain text, or a JSON string where the prompt itself has line ends."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    for line in filter(None, lines):
        try:
            quoted = json.loads(line) if line.startswith('"') else line
        except ValueError:
            quoted = line
        yield quoted


def _line(made: Continuation, args: argparse.Namespace) -> str:
    """Return the line that is printed for a continuation."""
    echo, logprobs = args.echo, args.logprobs
    if args.json:
        record: dict[str, Any] = {
            "prompt": made.prompt,
            "text": made.text,
            "finish_reason": made.finish_reason,
            "tokens": made.tokens,
            "ids": made.ids,
            "prompt_ids": made.prompt_ids,
        }
        if logprobs:
            record["logprobs"] = made.log_probabilities
        if logprobs and echo:
            record["prompt_logprobs"] = [None, *made.prompt_log_probabilities]  # nothing foretells the first token
        return json.dumps(record, ensure_ascii=False)
    text = made.prompt + made.text if echo else made.text
    if not logprobs:
        return text
    scores = [*made.prompt_log_probabilities, *made.log_probabilities]
    return f"{text}\n{' '.join(f'{score:.4f}' for score in scores)}"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m megajax.generate",
        description="Let a trained model continue text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="directory of a run: output_dir of a training, or --out of an import")
    add("words", nargs="*", metavar="KEY=VALUE", help="values for layout and precision, such as parallel.tensor=2")
    add("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be given again")
    add("--prompts-file", type=Path, metavar="FILE", help="file with one prompt in a line, plain or as a JSON string")
    add("--tokens", type=int, default=64, metavar="N", help="largest number of new tokens")
    add("--stop", action="append", default=[], metavar="TEXT", help="text before which to end; may be given again")
    add(
        "--temperature", type=float, default=1.0, metavar="T", help="divisor of the logits; 0 takes the likeliest token"
    )
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens; 0 = from all")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest tokens of total probability P")
    add("--seed", type=int, default=0, help="seed of the random draws")
    add("--step", type=int, metavar="N", help="step of the checkpoint; unset = the newest")
    add("--chat", action="store_true", help="answer a prompt as what a user says, or as a JSON list of messages")
    add("--system", metavar="TEXT", help="with --chat: instruction that the assistant gets first")
    add("--special-tokens", action="store_true", help="read names of special tokens in prompts as these tokens")
    add(
        "--add-bos",
        action=argparse.BooleanOptionalAction,
        help="begin with the beginning-of-sequence token; unset = as in training",
    )
    add("--batch-size", type=int, default=32, metavar="N", help="number of prompts that run together")
    add("--echo", action="store_true", help="print the prompt before its continuation")
    add(
        "--logprobs",
        action="store_true",
        help="print the log-probability of every new token, with --echo of the prompt's too",
    )
    add("--json", action="store_true", help="print a JSON record with ids in each line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
