"""`python -m megajax`: list every command with its purpose, and every configuration that can be named."""

from __future__ import annotations

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from megajax.config.base import InputError
from megajax.config.cli import entry_point
from megajax.config.presets import CONFIGS, list_presets


@entry_point
def main(argv: list[str]) -> None:
    """Print the list of commands and configurations."""
    commands = list_commands()
    if argv and argv[0] not in ("-h", "--help"):
        name = f"megajax.{argv[0]}"
        hint = f"run `python -m {name}`" if name in commands else "it lists the commands and takes no words"
        raise InputError(f"python -m megajax {argv[0]}: {hint}")
    print("Commands (each explains itself with --help):\n")
    for name, purpose in commands.items():
        print(f"  python -m {name:<18} {purpose}")
    print(f"\nConfigurations by name, such as `python -m megajax.train quickstart` (files in {CONFIGS}):\n")
    for name, title in list_presets().items():
        print(f"  {name:<22} {title}")


def list_commands() -> dict[str, str]:
    """Return the module of each command, with the first sentence of its docstring; no module is imported for it."""
    commands = {}
    for package in ("megajax", "launch"):
        spec = find_spec(package)
        for path in sorted(Path(spec.origin).parent.glob("*.py")) if spec and spec.origin else []:
            first, _, _ = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")
            if found := re.match(rf"`python -m {package}\.{path.stem}\b.*?`[^:]*: (.*?)(?:[.;?]?$|[.;?] )", first):
                commands[f"{package}.{path.stem}"] = found[1]
    return commands


if __name__ == "__main__":
    sys.exit(main())
