"""Lookup of the configurations that MegaJAX brings, by name: `llama3_8b`, `recipes/gpt3_1.3b_bf16.yaml`, `quickstart`.

The configurations are the files of the repository's `configs/`, which `megajax/configs` points to; a wheel holds a copy
of them. A file of the user comes first. A bare name is that of a file in `configs/` itself, `configs/models/` or
`configs/recipes/`; files of other folders are named with their folder (`verify/gpt_tiny`).
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from megajax.config.base import InputError

CONFIGS = (Path(__file__).parents[1] / "configs").resolve()
"""Folder of the presets, the recipes and the text that they train on."""
_BY_BARE_NAME = ("", "models", "recipes")
"""Folders whose files need no folder in their name. No name is in two of them."""


def find_config(name: str, beside: Path = Path()) -> Path:
    """Find the configuration file that has a name.

    Args:
        name: path relative to `beside` or to `configs/`, or the bare name of a preset or recipe; `.yaml` may be left
            out, and `configs/` may stand before it.
        beside: folder of the file that mentions the name, or the working directory.

    Raises:
        InputError: there is no such file; names that look like it are suggested.
    """
    bundled = CONFIGS / Path(name).relative_to("configs") if Path(name).parts[:1] == ("configs",) else CONFIGS / name
    folders = _BY_BARE_NAME[1:] if Path(name).name == name else ()
    candidates = [beside / name, bundled, *(CONFIGS / folder / name for folder in folders)]
    for path in candidates:
        for spelling in (path, path.with_name(f"{path.name}.yaml")):
            if spelling.is_file():
                return spelling
    if candidates[0].is_dir():
        raise InputError(f"cannot read configuration file {name}: it is a directory")
    near = _nearest(name)
    hint = f"did you mean {' or '.join(near)}?" if near else "`python -m megajax` lists all presets"
    raise InputError(f"configuration file {name} not found in {beside.absolute()} or {CONFIGS}: {hint}")


def find_bundled(path: str) -> str:
    """Return the path of a file as the user named it, or of the file that MegaJAX brings under this name."""
    name = Path(path)
    if name.parts[:1] == ("configs",) and not name.exists():
        bundled = CONFIGS / name.relative_to("configs")
        return str(bundled) if bundled.exists() else path
    return path


def list_presets() -> dict[str, str]:
    """List every configuration by its shortest name, with its title, which is the beginning of its first line."""
    presets = {}
    folders = [*_BY_BARE_NAME, *sorted({path.parent.name for path in CONFIGS.glob("*/*.yaml")} - set(_BY_BARE_NAME))]
    for folder in folders:
        for path in sorted((CONFIGS / folder).glob("*.yaml")):
            name = path.stem if folder in _BY_BARE_NAME else f"{folder}/{path.stem}"
            with path.open(encoding="utf-8") as file:
                presets[name] = re.split(r"[.:](?:\s|$)", file.readline().removeprefix("# "))[0].strip()
    return presets


def _nearest(name: str) -> list[str]:
    """Return the names of presets that a wrong name may have meant, best first."""
    wanted = Path(name).with_suffix("").name if name.endswith(".yaml") else Path(name).name
    names = {preset.rpartition("/")[2]: preset for preset in reversed(list_presets())}
    same = [preset for preset in list_presets() if preset.rpartition("/")[2] == wanted]
    return same or [names[near] for near in difflib.get_close_matches(wanted, names, n=2, cutoff=0.6)]
