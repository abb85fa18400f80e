"""Command line that every entry point shares: `python -m megajax.train CONFIG.yaml key=value ...`.

Nothing here reads `sys.argv` before an entry point is called, so importing MegaJAX in a notebook parses nothing.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from textwrap import indent
from typing import NoReturn, Protocol

from megajax.config.base import InputError, NotReady
from megajax.config.checks import check_config
from megajax.config.keys import FIELDS, SECTIONS, did_you_mean, first_key, flat_values, nearest, type_name, value_for
from megajax.config.load import Loaded, StartOf, derived_values, load_config
from megajax.config.yaml_text import yaml_text

_REMEDIES = {
    "make room": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "check who may read and write there": (errno.EACCES, errno.EPERM, errno.EROFS),
    "check the path": (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG),
    "name a file": (errno.EISDIR,),
    "raise the limit (ulimit -n)": (errno.EMFILE, errno.ENFILE),
}
MENDABLE = {number: remedy for remedy, numbers in _REMEDIES.items() for number in numbers}
"""Number of a system error that the user can mend -> the remedy. Others, such as those of a failing disk or network,
may be gone after a restart."""
_READER_LEFT = 128 + 13
"""Exit code of a program that SIGPIPE ends, which is how `head` tells other programs that it has enough."""
EPILOG = "Keys that may stand in the file and on the command line (YAML values):"


class Command(Protocol):
    """Type of an entry point's `main` once it is decorated."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run with these words, or with those of the process, and return the exit code."""
        ...


def entry_point(run: Callable[[list[str]], int | None]) -> Command:
    """Turn `run(argv)` into a command that returns an exit code and prints one line instead of a traceback for bad
    input.

    Use it as `sys.exit(main())`, or call `main(["config.yaml", "train.steps=3"])` from Python. Without arguments it
    takes those of the process. The exit code is that of `describe_failure` if there is a failure, and otherwise what
    `run` returns (None stands for 0).
    """

    @wraps(run)
    def command(argv: Sequence[str] | None = None) -> int:
        for stream in (sys.stdout, sys.stderr):
            if getattr(stream, "errors", None) == "strict" and isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a terminal of ASCII stops nothing
        try:
            try:
                return run(sys.argv[1:] if argv is None else list(argv)) or 0
            finally:
                sys.stdout.flush()  # a reader that has left shows here, not when Python ends
        except SystemExit as stop:
            if isinstance(stop.__context__, BrokenPipeError):  # as rich ends a program
                return _READER_LEFT
            raise
        except (InputError, OSError, FloatingPointError, KeyboardInterrupt) as error:
            if isinstance(error, BrokenPipeError) and _reader_left():
                return _READER_LEFT
            code, text = describe_failure(error)
            if code == 1:
                raise
            print(f"megajax: {text}", file=sys.stderr)
            return code

    return command


def _reader_left() -> bool:
    """Say whether nobody reads what this process prints; if so, send what is still to be printed nowhere."""
    try:
        output = select.poll()
        output.register(sys.stdout, 0)
        left = any(event & select.POLLERR for _, event in output.poll(0))
        if left:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no file at all, as in a notebook
        return False
    return left


def describe_failure(error: BaseException) -> tuple[int, str]:
    """Return the exit code that stands for an exception, and the line that describes it.

    The codes are 2 for bad input, 3 for a run that diverged, 5 for something that is not ready yet, 130 for an
    interruption, and 1 for anything else, whose traceback is worth printing.
    """
    match error:
        case NotReady():
            return 5, " ".join(["error:", *str(error).split()])
        case InputError():
            return 2, " ".join(["error:", *str(error).split()])
        case OSError() if error.errno in MENDABLE:
            where = f"{error.filename}: " if error.filename else ""
            return 2, f"error: {where}{error.strerror or error}: {MENDABLE[error.errno]}"
        case FloatingPointError():
            return 3, " ".join(["stopped:", *str(error).split()])
        case KeyboardInterrupt():
            return 130, "interrupted"
    return 1, " ".join([f"{type(error).__name__}:", *str(error).split()])


def parse_command_line(
    prog: str,
    description: str,
    argv: Sequence[str],
    start_of: StartOf,
    extra: Callable[[argparse.ArgumentParser], object] | None = None,
) -> tuple[Loaded, argparse.Namespace]:
    """Read `[CONFIG.yaml] [KEY=VALUE ...] [options]` and check the configuration.

    Args:
        prog: command that the user typed, e.g. `python -m megajax.train`.
        description: sentence that `--help` shows first.
        argv: words of the command line after `prog`.
        start_of: function that reads the values by key that `init_from` implies where it names no run; it must not
            write (`megajax.interop.init_from.start_of`, which this module must not import).
        extra: function that adds the entry point's own options to the parser; they come back in the namespace.

    Raises:
        InputError: the user has to correct something.
        SystemExit: `--help` or `--print-config` is given and printed; the code is 0.
    """
    parser = _Parser(prog=prog, description=description, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG.yaml|KEY=VALUE", help="configuration file, and values that override it"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every value and where it comes from, then stop"
    )
    if extra is not None:
        extra(parser)
    options, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise InputError(f"unknown option {unknown[0]}: {_instead_of(unknown[0])}")
    overrides = [word for word in options.words if re.match(r"[\w.]+\s*=", word)]
    files = [word for word in options.words if word not in overrides]
    if len(files) > 1:
        raise InputError(f"more than one configuration file ({', '.join(files)}); others are KEY=VALUE")
    loaded = load_config(files[0] if files else None, overrides, start_of)
    check_config(loaded.config)
    if options.print_config:
        print(describe_values(loaded))
        raise SystemExit(0)
    return loaded, options


def describe_keys() -> str:
    """List every key with its type, default and meaning."""
    lines: list[str] = []
    for key, field in FIELDS.items():
        section, _, _ = key.rpartition(".")
        if section and key == first_key(section):
            lines.append(f"\n{section}: {SECTIONS[section]}")
        default = "unset" if field.default is None else yaml_text(field.default)
        lines.append(f"  {key} ({type_name(field.annotation)}) = {default}")
        lines.append(indent(str(field.description), "      "))
    return "\n".join(lines)


def describe_values(loaded: Loaded) -> str:
    """List every value with its origin, as YAML that loads again; the padded vocabulary is a comment."""
    values = flat_values(loaded.config) | derived_values(loaded.config)
    texts = [f"{'' if key in FIELDS else '# '}{key}: {yaml_text(value)}" for key, value in values.items()]
    width = max(len(text) for text in texts if len(text) < 60)
    return "\n".join(f"{text:<{width}}  # {loaded.origins[key]}" for text, key in zip(texts, values, strict=True))


class OneLineParser(argparse.ArgumentParser):
    """Parser whose errors are one line, as those of every other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise an InputError with argparse's message."""
        raise InputError(message)


class _Parser(OneLineParser):
    """Parser of entry points that take a configuration; its help lists the keys."""

    def format_help(self) -> str:
        return f"{super().format_help()}\n{describe_keys()}\n"


def _instead_of(flag: str) -> str:
    name = flag.partition("=")[0]
    return f"write {nearest(name)[0]}={value_for(name) or 'VALUE'}" if nearest(name) else did_you_mean(name)
