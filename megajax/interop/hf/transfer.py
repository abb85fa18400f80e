"""Runs of Hugging Face models, and Hugging Face models of runs.

An imported run looks like one that was trained here, with a checkpoint of step 0 that holds weights alone:

    config.yaml     what config.json says, and what the user said besides
    checkpoints/0   the weights, fp32
    huggingface/    config.json, tokenizer and other small files as they came; tensors.json lists the tensors

A run that starts from such weights (`init_from`) takes that folder over. Exported it gives the same files again, to
the bit unless it was trained on; a run that began here gets new ones. Either way weights move a layer at a time, and
what is being written has another name until it is complete.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from megajax.checkpoint.errors import one_line
from megajax.checkpoint.store import Checkpoints
from megajax.config import Config, InputError, ModelConfig, TokenizerConfig, check_config, dump_config, load_config
from megajax.config.load import dump_run, start_values
from megajax.corpus.chat import roles_as_text
from megajax.corpus.prepare import own_tokenizer
from megajax.data.tokenizers import Tokenizer, build_tokenizer
from megajax.data.tokenizers.tokenizer import ROLES
from megajax.interop.hf.families import family_for, family_of, updated_settings
from megajax.interop.hf.family import Family
from megajax.interop.hf.incoming import Incoming
from megajax.interop.hf.manifest import Manifest
from megajax.interop.hf.matching import check_count
from megajax.interop.hf.moves import Moves
from megajax.interop.hf.outgoing import Outgoing
from megajax.interop.hf.source import PRECISIONS, Source, open_source, read_json
from megajax.interop.hf.tokenizers import write_tokenizer
from megajax.interop.imported import ParamsWriter
from megajax.training.run_directory import RunDirectory
from megajax.training.setup import check_tokenizer

log = logging.getLogger(__name__)

FOLDER = "huggingface"
"""Of a run: what came with its model."""
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*",
    "vocab.*", "merges.txt", "*.model", "generation_config.json",
)  # fmt: skip


def import_model(
    source: Path, out: Path, words: Sequence[str] = (), *, interleaved_rope: bool = False, draw_heads: bool = False
) -> None:
    """Make a run of a Hugging Face model.

    Args:
        source: directory with config.json and safetensors files, or one of these beside config.json.
        out: directory of the run, which must not exist.
        words: `KEY=VALUE` that differ from what the files say, or say more.
        interleaved_rope: the rotary embedding of these weights turns neighbours, as in LLaMA's first release.
        draw_heads: heads that the files lack are drawn at random.

    Raises:
        InputError: the files are damaged or incomplete, contradict one another, or describe a model that has no
            counterpart here.
    """
    with staged_directory(out) as staged, open_source(source) as files:
        family = family_of(files.settings)
        folder = staged / FOLDER
        folder.mkdir()
        for path in (files.directory / "config.json", *_carried(files.directory)):
            shutil.copyfile(path, folder / path.name)
        Manifest.of(files, interleaved_rope=interleaved_rope).write(folder / "tensors.json")
        config, tokenizer = _configure(family, files, staged, out, words)
        if not _came_with_model(staged, config):
            _leave_tokenizer_behind(folder, tokenizer)
        moves = Moves(family, config.model, interleaved_rope=interleaved_rope)
        incoming = Incoming(files, moves, config.model, config.train.seed, draw_heads=draw_heads)
        writer = ParamsWriter(staged / "checkpoints")
        incoming.write(writer)
        writer.finish({"consumed_samples": 0, "tokenizer": tokenizer.identity, "imported": family.model_type})
        RunDirectory(staged).identify()


def read_start(source: Path) -> dict[str, Any]:
    """Architecture and tokenizer of a Hugging Face model, by key; nothing is written and no weights are read.

    Raises:
        InputError: as `import_model`.
    """
    with open_source(source) as files:
        model = _model_of(family_of(files.settings), files)
        return start_values(Config(model=model, tokenizer=_usable_tokenizer(files.directory, model)))


def source_files(source: Path) -> list[Path]:
    """Files of a Hugging Face model of which a run is made.

    Raises:
        InputError: as `import_model`.
    """
    with open_source(source) as files:
        folder = files.directory
        return [folder / "config.json", *(folder / name for name in sorted(files.metadata)), *_carried(folder)]


def export_model(run_dir: Path, out: Path, step: int | None = None, precision: str | None = None) -> None:
    """Make a Hugging Face model of a run.

    Args:
        run_dir: of a training or an import.
        out: directory of the model, which must not exist.
        step: of the checkpoint; None for the newest.
        precision: fp32, bf16 or fp16; None for what the imported files had, or fp32.

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
    imported, came = run.path / FOLDER, _came_with_model(run.path, config)
    if imported.is_dir():
        before = read_json(imported / "config.json")
        family, manifest = family_of(before), Manifest.read(imported / "tensors.json")
        settings = updated_settings(before, family, model, manifest.dtypes)
        moves = Moves(family, model, interleaved_rope=manifest.interleaved_rope)
        if "imported" not in record and not manifest.is_complete(moves):  # heads that were drawn are trained by now
            manifest = manifest.completed(moves)
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
        outgoing.write(staged, manifest, PRECISIONS[precision].name if precision else None)
        for path in _carried(imported) if came else ():
            shutil.copyfile(path, staged / path.name)
        if not came or _reads_otherwise(run.path, config):
            _write_own_tokenizer(config, staged, family.model_type)
        if came and imported.is_dir():
            _tell_changed_ids(run.path, config, staged, settings)
        text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
        (staged / "config.json").write_text(text + "\n", encoding="utf-8")


def _configure(
    family: Family, files: Source, staged: Path, out: Path, words: Sequence[str]
) -> tuple[Config, Tokenizer]:
    """Write config.yaml; what it says, and the tokenizer that it names."""
    model = _model_of(family, files)
    _check_ids(files)
    most, _ = Counter(tensor.dtype for tensor in files.tensors.values()).most_common(1)[0]
    if "auto_map" in files.settings:
        log.warning("config.json of %s names code of its own (auto_map): it is not run", files.directory)
    said = files.settings.get("dtype") or files.settings.get("torch_dtype")
    if said and said not in {p.word for p in PRECISIONS.values() for t in files.tensors.values() if p.name == t.dtype}:
        log.warning("%s: config.json says %s, most tensors are %s: taken as they are", files.directory, said, most)
    given = Config(output_dir=str(out), model=model, tokenizer=_usable_tokenizer(staged / FOLDER, model))
    precision = next((ours for ours, theirs in PRECISIONS.items() if theirs.name == most), "fp32")
    length = min(given.data.seq_length, model.max_positions)
    file = staged / "config.yaml"
    file.write_text(dump_config(given), encoding="utf-8")
    config = load_config(file, [f"train.precision={precision}", f"data.seq_length={length}", *words]).config
    check_config(config)
    config = replace(config, tokenizer=own_tokenizer(config.tokenizer, staged))
    file.write_text(dump_run(config, staged), encoding="utf-8")
    return config, build_tokenizer(config.tokenizer)


def _model_of(family: Family, files: Source) -> ModelConfig:
    """The model that config.json describes, if it is that of the files."""
    model = family.described(files.settings, files.tensors)
    check_count(files.tensors, model, files.directory)
    return model


def _check_ids(files: Source) -> None:
    """Refuse special tokens that are no ids; several may end a text.

    Raises:
        InputError: names the first.
    """
    generation = files.directory / "generation_config.json"
    documents = {"config.json": files.settings}
    if generation.is_file():
        documents[generation.name] = read_json(generation)
    for name, document in documents.items():
        for role in ("bos", "eos", "pad", "decoder_start"):
            ids = document.get(f"{role}_token_id")
            for number in _as_list(ids):
                if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                    raise InputError(f"{files.directory / name}: {role}_token_id is {ids!s:.60}, no id: correct it")


def _usable_tokenizer(folder: Path, model: ModelConfig) -> TokenizerConfig:
    """The tokenizer that came with a model in a folder; plain ids if there is none of use."""
    assert model.vocab_size is not None
    config = _tokenizer_in(folder, model.family)
    ids = TokenizerConfig(type="null", vocab_size=model.vocab_size - 1)  # and one that ends documents
    if config is None:
        log.warning("the model has no tokenizer: texts are read as token ids")
        return ids
    try:
        size = build_tokenizer(config).vocab_size
    except InputError as error:
        log.warning("its tokenizer is of no use, texts are read as token ids: %s", error)
        return ids
    if size > model.vocab_size:
        log.warning("its tokenizer has %d ids, the model %d: texts with the others are refused", size, model.vocab_size)
    return config


def _tokenizer_in(folder: Path, family: str) -> TokenizerConfig | None:
    """The tokenizer that came with a model of a family, if one did."""
    there = {path.name: str(path) for path in _carried(folder)}
    extra = 100 if family == "t5" else 0
    pieces = next((name for name in there if name.endswith(".model")), None)
    if "tokenizer.json" in there:
        return TokenizerConfig(type="huggingface", model=there["tokenizer.json"], extra_ids=extra)
    if pieces:
        return TokenizerConfig(type="sentencepiece", model=there[pieces], extra_ids=extra, extra_ids_descend=extra > 0)
    if "vocab.txt" in there:
        about = there.get("tokenizer_config.json")
        lower = read_json(Path(about)).get("do_lower_case", True) if about else True
        return TokenizerConfig(type="bert_wordpiece", vocab=there["vocab.txt"], lower_case=lower, append_ends=False)
    if "vocab.json" in there and "merges.txt" in there:
        return TokenizerConfig(type="gpt2_bpe", vocab=there["vocab.json"], merges=there["merges.txt"])
    return None


def _came_with_model(run: Path, config: Config) -> bool:
    """Whether a run has the tokenizer that came with its model, or none of use did: ids mean what they meant there."""
    if config.tokenizer.type == "null":
        return (run / FOLDER).is_dir()
    came = _tokenizer_in(run / FOLDER, config.model.family)
    if came is None:
        return False
    one, other = (build_tokenizer(tokenizer) for tokenizer in (came, config.tokenizer))
    return one.identity == other.identity


def _reads_otherwise(run: Path, config: Config) -> bool:
    """Whether a run begins texts, writes chats or uses special tokens otherwise than what came with its model."""
    came = _tokenizer_in(run / FOLDER, config.model.family)
    if came is None or config.tokenizer.type == "null":
        return False
    theirs, ours = (
        (tokenizer.prefix, tokenizer.chat_template, [tokenizer.id_for(role) for role in ROLES])
        for tokenizer in (build_tokenizer(came), _own_tokenizer(config))
    )
    return theirs != ours


def _tell_changed_ids(run: Path, config: Config, out: Path, settings: dict[str, Any]) -> None:
    """Put into the settings, and into generation_config.json, which tokens begin, end and pad texts in a run now.

    What ended texts before still does, as in generation here.
    """
    came = _tokenizer_in(run / FOLDER, config.model.family)
    if came is None or config.tokenizer.type == "null":
        return
    model_type = settings["model_type"]
    theirs, ours = (_special_ids(build_tokenizer(each), model_type) for each in (came, config.tokenizer))
    changed = {key: number for key, number in ours.items() if theirs[key] != number}
    generation = out / "generation_config.json"
    documents = [settings, *([read_json(generation)] if generation.is_file() else [])]
    for document in documents if changed else ():
        ends = document.get("eos_token_id")
        document.update(changed)
        if "eos_token_id" in changed and ends is not None:
            document["eos_token_id"] = list(dict.fromkeys([ours["eos_token_id"], *_as_list(ends)]))
    if changed and generation.is_file():
        generation.write_text(json.dumps(documents[1], indent=2) + "\n", encoding="utf-8")


def _as_list(ids: Any) -> list[Any]:
    return ids if isinstance(ids, list) else [ids]


def _own_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a run, with a chat template that says how its conversations were written."""
    tokenizer = build_tokenizer(config.tokenizer)
    if config.data.kind == "instruction" and tokenizer.chat_template is None:
        tokenizer.chat_template = roles_as_text(tokenizer)
    return tokenizer


def _write_own_tokenizer(config: Config, out: Path, model_type: str) -> None:
    """Make files of the tokenizer that transformers reads.

    In the texts that a decoder was trained on, the name of a special token was text; what is written for other models,
    for chats and for gaps to be filled holds such names as the tokens themselves.
    """
    tokenizer, family, rows = _own_tokenizer(config), config.model.family, config.model.vocab_size
    if rows is not None and tokenizer.vocab_size > rows:
        log.warning(
            "the exported tokenizer has %d ids, the model %d: it cannot read the others", tokenizer.vocab_size, rows
        )
    plain = family == "gpt" and not config.data.fim_rate and tokenizer.chat_template is None
    write_tokenizer(
        tokenizer, out,
        model_type=model_type, longest=config.model.max_positions, names_are_text=plain, family=family,
    )  # fmt: skip


def _new_settings(family: Family, model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json of a model that began here."""
    return {
        "architectures": [family.architecture(model)],
        "model_type": family.model_type,
        "dtype": PRECISIONS["fp32"].word,
        **_special_ids(tokenizer, family.model_type),
        **family.write(model),
    }


def _special_ids(tokenizer: Tokenizer, model_type: str) -> dict[str, int | None]:
    """What config.json says of a tokenizer; a decoder beside an encoder begins as in training (see `data.t5`)."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eod_id, "pad": tokenizer.pad_id}
    if model_type == "t5":
        ids["decoder_start"] = tokenizer.pad_id if tokenizer.bos_id is None else tokenizer.bos_id
    return {f"{role}_token_id": number for role, number in ids.items()}


def carry_over(start: Path, run: Path, identity: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Copy what came with the model of a run into the one that starts from its weights, if anything came.

    Args:
        start: directory of the run with the weights.
        run: of the one that goes on.
        identity: of the tokenizer that the weights were trained with.
        tokenizer: that of the run. If it is another one, the files that go with ids, chats and ends are left behind.
    """
    source, folder = start / FOLDER, run / FOLDER
    if jax.process_index() > 0 or not source.is_dir():
        return
    shutil.rmtree(folder, ignore_errors=True)
    with staged_directory(folder) as staged:
        for path in (source / "config.json", source / "tensors.json", *_carried(source)):
            shutil.copyfile(path, staged / path.name)
        if identity != tokenizer.identity:
            _leave_tokenizer_behind(staged, tokenizer)


def _leave_tokenizer_behind(folder: Path, tokenizer: Tokenizer) -> None:
    """Take out of what came with a model all that goes with the ids of its tokenizer; `tokenizer` is another one."""
    names = [path.name for path in _carried(folder)]
    for name in names:
        (folder / name).unlink()
    file = folder / "config.json"
    settings = read_json(file)
    settings |= _special_ids(tokenizer, settings["model_type"])
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if names:
        log.warning("another tokenizer than the model's: left behind are its %s", ", ".join(names))


def _carried(folder: Path) -> list[Path]:
    """Small files that go with a model."""
    return sorted({path for pattern in CARRIED for path in folder.glob(pattern) if path.is_file()})


@contextmanager
def staged_directory(out: Path) -> Iterator[Path]:
    """A directory that becomes `out` if all goes well, and else is removed."""
    if out.exists():
        raise InputError(f"{out} exists: choose another directory, or delete it")
    staged = out.with_name(f"{out.name}.unfinished")
    with one_line(f"writing {out}", "make room, or choose another directory"):
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            yield staged
            staged.replace(out)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
