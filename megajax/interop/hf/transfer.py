"""Making of runs from Hugging Face models, and of Hugging Face models from runs.

An imported run looks like one that was trained here, with a checkpoint of step 0 that holds weights alone:

    config.yaml     the values of config.json, and what the user has said besides
    checkpoints/0   the weights, fp32
    huggingface/    config.json, tokenizer and other small files as they came; tensors.json lists the tensors

A run that starts from such weights (`init_from`) takes that folder over. Its export has the same files again, to the
bit unless it was trained on; the export of a run that began here has new ones. A directory that is being written has
another name until it is complete.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from megajax.checkpoint.store import Checkpoints
from megajax.config import Config, InputError, ModelConfig, check_config, dump_config, load_config
from megajax.config.load import dump_run, start_values
from megajax.corpus.prepare import own_tokenizer
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.interop.hf.families import family_for, family_of, updated_settings
from megajax.interop.hf.family import Family
from megajax.interop.hf.files import PRECISIONS, Manifest, Source, carried, open_source, read_json
from megajax.interop.hf.tensors import Moves, check_count, match
from megajax.interop.hf.tokenizers import (
    came_with_model,
    check_ids,
    export_tokenizer,
    leave_tokenizer_behind,
    special_ids,
    usable_tokenizer,
)
from megajax.interop.hf.weights import Incoming, Outgoing
from megajax.interop.imported import ParamsWriter, staged_directory
from megajax.training.run_directory import RunDirectory
from megajax.training.setup import check_tokenizer

log = logging.getLogger(__name__)


def import_model(
    source: Path, out: Path, words: Sequence[str] = (), *, interleaved_rope: bool = False, draw_heads: bool = False
) -> None:
    """Make a run of a Hugging Face model.

    Args:
        source: directory with config.json and safetensors files, or one of these beside config.json.
        out: directory of the run, which must not exist.
        words: `KEY=VALUE` words that differ from what the files say, or say more.
        interleaved_rope: whether the rotary embedding of these weights turns neighbours, as in LLaMA's first release.
        draw_heads: whether heads that the files lack are drawn at random.

    Raises:
        InputError: the files are damaged or incomplete, contradict one another, or describe a model that has no
            counterpart here.
    """
    with staged_directory(out) as staged, open_source(source) as files:
        family, run = family_of(files.settings), RunDirectory(staged)
        folder = run.huggingface
        folder.mkdir()
        for path in (files.directory / "config.json", *carried(files.directory)):
            shutil.copyfile(path, folder / path.name)
        Manifest.of(files, interleaved_rope=interleaved_rope).write(folder / "tensors.json")
        config, tokenizer = _configure(family, files, run, out, words)
        if not came_with_model(run, config):
            leave_tokenizer_behind(folder, tokenizer)
        moves = Moves(family, config.model, interleaved_rope=interleaved_rope)
        incoming = Incoming(files, moves, config.model, config.train.seed, draw_heads=draw_heads)
        writer = ParamsWriter(staged / "checkpoints")
        incoming.write(writer)
        writer.finish({"consumed_samples": 0, "tokenizer": tokenizer.identity, "imported": family.model_type})
        run.identify()


def read_start(source: Path) -> dict[str, Any]:
    """Read the values by key that a Hugging Face model implies: architecture and tokenizer, without any weights.

    Raises:
        InputError: `import_model` would refuse the model.
    """
    with open_source(source) as files:
        model = _model_of(family_of(files.settings), files)
        return start_values(Config(model=model, tokenizer=usable_tokenizer(files.directory, model)))


def source_files(source: Path) -> list[Path]:
    """List the files of a Hugging Face model of which a run is made.

    Raises:
        InputError: `import_model` would refuse the model.
    """
    with open_source(source) as files:
        folder = files.directory
        return [folder / "config.json", *(folder / name for name in sorted(files.metadata)), *carried(folder)]


def export_model(run_dir: Path, out: Path, step: int | None = None, precision: str | None = None) -> None:
    """Make a Hugging Face model of a run.

    Args:
        run_dir: directory of a training or an import.
        out: directory of the model, which must not exist.
        step: number of the checkpoint; None for the newest.
        precision: fp32, bf16 or fp16; None for that of the imported files, or fp32.

    Raises:
        InputError: there is no such checkpoint, it is damaged, its tokenizer is not there any more, or no family of
            Hugging Face has this model.
    """
    run, config = RunDirectory.open(run_dir)
    with Checkpoints(run.checkpoints(config.checkpoint), None, run.owner) as checkpoints:
        step = checkpoints.latest if step is None else step
        if step is None:
            raise InputError(f"{run.path} has no finished checkpoint: train it first")
        record, checkpoint = checkpoints.record(step), checkpoints.directory / str(step)
    check_tokenizer(build_tokenizer(config.tokenizer), record, run)
    model = replace(config.model, vocab_size=config.model.vocab_size or record["tokenizer"]["vocab_size"])
    if run.huggingface.is_dir():
        before = read_json(run.huggingface / "config.json")
        family, manifest = family_of(before), Manifest.read(run.huggingface / "tensors.json")
        settings = updated_settings(before, family, model, manifest.dtypes)
        moves = Moves(family, model, interleaved_rope=manifest.interleaved_rope)
        if "imported" not in record:  # heads that were drawn are trained by now
            there = match(manifest.dtypes, moves, "tensors.json")
            if there.absent:
                manifest = manifest.completed(dict(moves.tensors()), there.names)
                settings["architectures"] = [family.architecture(model)]
    else:
        family = family_for(model)
        moves = Moves(family, model)
        manifest = Manifest.new(dict(moves.tensors()), PRECISIONS[precision or "fp32"].name)
        settings = _new_settings(family, model, build_tokenizer(config.tokenizer))
    if precision:
        settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = PRECISIONS[precision].word
    outgoing = Outgoing(checkpoint, record, moves)
    with staged_directory(out) as staged:
        export_tokenizer(run, config, staged, settings)
        outgoing.write(staged, manifest, PRECISIONS[precision].name if precision else None)
        text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
        (staged / "config.json").write_text(text + "\n", encoding="utf-8")


def _configure(
    family: Family, files: Source, run: RunDirectory, out: Path, words: Sequence[str]
) -> tuple[Config, Tokenizer]:
    """Write config.yaml of an import, and return its values and the tokenizer that it names."""
    model = _model_of(family, files)
    check_ids(files)
    most, _ = Counter(tensor.dtype for tensor in files.tensors.values()).most_common(1)[0]
    if "auto_map" in files.settings:
        log.warning("config.json of %s names code of its own (auto_map): it is not run", files.directory)
    said = files.settings.get("dtype") or files.settings.get("torch_dtype")
    if said and said not in {p.word for p in PRECISIONS.values() for t in files.tensors.values() if p.name == t.dtype}:
        log.warning("%s: config.json says %s, most tensors are %s: taken as they are", files.directory, said, most)
    given = Config(output_dir=str(out), model=model, tokenizer=usable_tokenizer(run.huggingface, model))
    precision = next((ours for ours, theirs in PRECISIONS.items() if theirs.name == most), "fp32")
    length = min(given.data.seq_length, model.max_positions)
    file = run.config_file
    file.write_text(dump_config(given), encoding="utf-8")
    config = load_config(file, [f"train.precision={precision}", f"data.seq_length={length}", *words]).config
    check_config(config)
    config = replace(config, tokenizer=own_tokenizer(config.tokenizer, run.path))
    file.write_text(dump_run(config, run.path), encoding="utf-8")
    return config, build_tokenizer(config.tokenizer)


def _model_of(family: Family, files: Source) -> ModelConfig:
    """Return the model that config.json describes, after a check that the files can hold it."""
    model = family.described(files.settings, files.tensors)
    check_count(files.tensors, model, files.directory)
    return model


def _new_settings(family: Family, model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json of a model that began here."""
    return {
        "architectures": [family.architecture(model)],
        "model_type": family.model_type,
        "dtype": PRECISIONS["fp32"].word,
        **special_ids(tokenizer, family.model_type),
        **family.write(model),
    }


def carry_over(start: RunDirectory, run: RunDirectory, identity: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Copy what came with the model of a run into the run that starts from its weights, if anything came.

    Args:
        start: run that has the weights.
        run: run that starts from the weights.
        identity: identity of the tokenizer with which the weights were trained.
        tokenizer: tokenizer of `run`. If it is another one, files that go with ids, chats and ends are left behind.
    """
    source, folder = start.huggingface, run.huggingface
    if jax.process_index() > 0 or not source.is_dir():
        return
    shutil.rmtree(folder, ignore_errors=True)
    with staged_directory(folder) as staged:
        for path in (source / "config.json", source / "tensors.json", *carried(source)):
            shutil.copyfile(path, staged / path.name)
        if identity != tokenizer.identity:
            leave_tokenizer_behind(staged, tokenizer)
