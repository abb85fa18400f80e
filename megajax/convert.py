"""`python -m megajax.convert import SRC --out RUN` and `export RUN --out DIR`: bring models in from elsewhere, and out.

Hugging Face models go both ways: `megajax.interop.hf.transfer` describes the run that is made, and `megajax.interop.hf`
lists the families. Checkpoints of Megatron-LM come in (`megajax.interop.megatron.transfer`), as weights without the
state of the optimizer; nothing goes out in its format.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from megajax.cluster.detect import require_one_process
from megajax.config import InputError
from megajax.config.cli import OneLineParser, entry_point
from megajax.interop.hf.files import PRECISIONS
from megajax.interop.hf.transfer import export_model, import_model
from megajax.interop.megatron.read import is_megatron
from megajax.interop.megatron.transfer import import_megatron

ONLY = {"import": ("words", "interleaved_rope", "draw_heads", "ignore_args"), "export": ("step", "dtype")}
"""Direction -> the options that only this direction has."""


@entry_point
def main(argv: list[str]) -> None:
    """Run the command line and say on stdout what was made."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", force=True)
    require_one_process("conversion")
    given = _parser().parse_intermixed_args(argv)
    for action, names in ONLY.items():
        for name in names:
            if action != given.action and getattr(given, name):
                what = f"--{name.replace('_', '-')}" if name != "words" else given.words[0]
                raise InputError(f"{what} is for `convert {action}`: leave it out")
    if given.action == "import" and is_megatron(given.source):
        if given.interleaved_rope:
            raise InputError("--interleaved-rope is for Hugging Face models: Megatron-LM's say it themselves")
        if given.draw_heads:
            raise InputError("--draw-heads is for Hugging Face models: leave it out")
        import_megatron(given.source, given.out, given.words, given.ignore_args.split(","))
        print(f"{given.out} is a run with the weights of {given.source}")
    elif given.action == "import":
        if given.ignore_args:
            raise InputError("--ignore-args is for checkpoints of Megatron-LM: leave it out")
        flags = {"interleaved_rope": given.interleaved_rope, "draw_heads": given.draw_heads}
        import_model(given.source, given.out, given.words, **flags)
        print(f"{given.out} is a run with the weights of {given.source}")
    else:
        export_model(given.source, given.out, given.step, given.dtype)
        print(f"{given.out} is a Hugging Face model with the weights of {given.source}")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m megajax.convert",
        description="Import models of Hugging Face and checkpoints of Megatron-LM, and export to Hugging Face.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("action", choices=list(ONLY), help="import makes a run of a model, export makes a model of a run")
    add(
        "source",
        type=Path,
        metavar="SRC",
        help="import: directory of a model, its .safetensors file, or Megatron-LM's; export: run",
    )
    add("words", nargs="*", metavar="KEY=VALUE", help="import: values for the configuration of the run")
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of the run or model that is made, which must not exist",
    )
    add(
        "--interleaved-rope",
        action="store_true",
        help="import: read rotary pairs as neighbours (LLaMA's first release)",
    )
    add("--draw-heads", action="store_true", help="import: draw heads that the files lack at random")
    what = "import: accept these unknown arguments of a Megatron-LM checkpoint as harmless (names with commas between)"
    add("--ignore-args", metavar="NAMES", default="", help=what)
    add("--step", type=int, metavar="N", help="export: step of the checkpoint (default: the newest)")
    add(
        "--dtype",
        choices=list(PRECISIONS),
        help="export: precision of all tensors (default: as imported, or else fp32)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
