"""Preparation of a run: the user's files become tokenizer and token files in the run's directory, once.

A run has its own copy of the tokenizer, so that it can be moved and does not depend on the original. Tokenizer and
token files both record what they were made from (`megajax.made_from`). When that has changed they are made again, or
refused if there is a checkpoint that was trained on them.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megajax.config.base import InputError
from megajax.config.data import DataConfig, TokenizerConfig
from megajax.config.presets import find_bundled
from megajax.config.run_files import TOKENIZER, TRAINED_TOKENIZER, tokenizer_places
from megajax.corpus.conversations import read_conversations, write_conversations
from megajax.corpus.corpus import preprocess
from megajax.corpus.readers import bare_name, input_files, read_documents
from megajax.data.samples import KINDS
from megajax.data.tokenizers import (
    build_tokenizer,
    in_directory,
    needs_training,
    tokenizer_files,
    train_tokenizer,
)
from megajax.data.tokenizers.beside import BESIDE
from megajax.made_from import MadeFrom, sources_in

log = logging.getLogger(__name__)

RECORD = "made_from.json"


def prepare_text(
    data: DataConfig, tokenizer: TokenizerConfig, directory: Path, kind: str = "gpt", trained: bool = False
) -> tuple[DataConfig, TokenizerConfig]:
    """Replace `data.text` by token files, and the tokenizer by the run's own, copied or trained on that text.

    Args:
        data: sources; returned unchanged if they name no text.
        tokenizer: tokenizer of the text, as the user names it.
        directory: directory of the run.
        kind: kind of samples (`data.samples.KINDS`); sequences are documents, sentences without ends of documents, or
            the turns of conversations.
        trained: whether there is a checkpoint.

    Raises:
        InputError: a file cannot be used, or is not the one on which the run was trained.
    """
    run = str(directory) if trained else ""
    data = replace(data, text=_texts(data.text, directory / "data", run))
    tokenizer = own_tokenizer(tokenizer, directory, data, kind, run)
    if not data.text:
        return data, tokenizer
    prefixes = [
        _tokenize(number, text, directory / "data", data.text_key, tokenizer, kind, run)
        for number, text in enumerate(data.text)
    ]
    return replace(data, text=(), path=tuple(prefixes)), tokenizer


def _texts(names: Sequence[str], folder: Path, run: str) -> tuple[str, ...]:
    """List the files that `data.text` names, and refuse others than those on which a run was trained."""
    records = {int(path.name.split(".")[0]): path for path in folder.glob(f"[0-9]*.{RECORD}")}
    try:
        texts = input_files(map(find_bundled, names))
    except InputError:  # a pattern that no file matches any more
        if not run or not records:
            raise
        texts = [path for number in sorted(records) for path in sources_in(records[number]) or ()]
    made = records.keys() | {int(path.name.split("-")[0]) for path in folder.glob("[0-9]*-*.idx")}
    if run and made and names and len(texts) != len(made):
        raise InputError(
            f"data.text stands for {len(texts)} files, and {run} was trained on {len(made)}: name those, or choose "
            "another output_dir"
        )
    for number, path in records.items():
        if number >= len(texts) and not run:
            path.unlink()
    return tuple(texts)


def own_tokenizer(
    config: TokenizerConfig, directory: Path, data: DataConfig | None = None, kind: str = "gpt", run: str = ""
) -> TokenizerConfig:
    """Give a run its own tokenizer, unless it has one, and return the configuration that names its files there.

    Args:
        config: tokenizer as the user names it.
        directory: directory of the run.
        data: sources whose text trains the tokenizer if it has no file.
        kind: kind of the samples.
        run: name of the run, once there is a checkpoint.

    Raises:
        InputError: the tokenizer cannot be read or trained, or is not the one with which the run was trained.
    """
    data, folder = data or DataConfig(), directory / TOKENIZER
    key, name = TRAINED_TOKENIZER.get(config.type, ("", ""))
    trained, older, _ = tokenizer_places(directory, name)
    if config.vocab_size is not None and key and getattr(config, key) in (str(trained), str(older)):
        config = _with(config, key, None)  # config.yaml names the run's own trained tokenizer
    own, sources = in_directory(config, folder), tokenizer_files(config)
    options: dict[str, Any] = {"type": config.type}
    make: Callable[[], object] = partial(_copy, config, folder)
    if needs_training(config):
        if not data.text:
            return own if _are_there(own) else config
        sources = [*map(Path, data.text), *sources]
        options |= {"vocab_size": config.vocab_size, "lower_case": config.lower_case}
        options |= {"kind": kind, "text_key": data.text_key}
        make = partial(_train, config, data, folder, kind)
        if run and older.is_file() and not _are_there(own):
            make = partial(_copy, _with(config, key, older), folder)
    elif all(directory.resolve() in path.resolve().parents for path in sources):
        return config
    recipe = MadeFrom(sources, options)
    recipe.ensure(f"the tokenizer in {folder}", folder / RECORD, make, there=_are_there(own), trained=run)
    return own


def _with(config: TokenizerConfig, key: str, path: Path | None) -> TokenizerConfig:
    names: dict[str, Any] = {key: path and str(path)}
    return replace(config, **names)


def _are_there(config: TokenizerConfig) -> bool:
    return all(path.is_file() for path in tokenizer_files(config) if path.name not in BESIDE)


def _train(config: TokenizerConfig, data: DataConfig, folder: Path, kind: str) -> None:
    log.info("a tokenizer of %d pieces is trained on %s: %s", config.vocab_size, ", ".join(data.text), folder)
    chats = KINDS[kind].made_of == "conversation"
    texts = map("".join, read_conversations(data.text)) if chats else read_documents(data.text, data.text_key)
    shutil.rmtree(folder, ignore_errors=True)
    train_tokenizer(config, texts, folder)
    _copy_files(tokenizer_files(config), folder)


def _copy(config: TokenizerConfig, folder: Path) -> None:
    """Copy the files of a tokenizer, if it can be read."""
    build_tokenizer(config)
    staged = folder.with_name(f".{folder.name}")
    shutil.rmtree(staged, ignore_errors=True)
    _copy_files(tokenizer_files(config), staged)
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)


def _copy_files(files: Sequence[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())


def _tokenize(number: int, text: str, folder: Path, key: str, tokenizer: TokenizerConfig, kind: str, run: str) -> str:
    """Make the token files of a text file, unless they are there and made from this very text; return their prefix."""
    made_of = KINDS[kind].made_of
    sentences = made_of == "sentence"
    prefix = folder / f"{number}-{bare_name(text)}"  # the number distinguishes files of the same name
    ending = "_conversation" if made_of == "conversation" else f"_{key}_{made_of}"
    there = [path.with_suffix("") for path in folder.glob(f"{number}-*{ending}.idx")]

    def make() -> None:
        for old in folder.glob(f"{number}-*"):
            if old.suffix in (".idx", ".bin"):
                old.unlink()
        if made_of == "conversation":
            count = write_conversations([text], f"{prefix}{ending}", build_tokenizer(tokenizer))
            log.info("%s: %d conversations", f"{prefix}{ending}", count)
            return
        log.info("%s", preprocess([text], prefix, tokenizer, key, append_eod=not sentences, split_sentences=sentences))

    built = build_tokenizer(tokenizer)
    around = {"eod_id": built.eod_id, "prefix": list(built.prefix), "chat_template": built.chat_template}
    options = {"text_key": key, "kind": kind, "tokenizer": {**built.identity, **around}}
    what = str(there[0] if there else f"{prefix}{ending}")
    now = MadeFrom([text], options).ensure(what, folder / f"{number}.{RECORD}", make, there=bool(there), trained=run)
    return f"{prefix}{ending}" if now else what
