"""Making of runs from Megatron-LM's checkpoints: weights and architecture come over, the optimizer's state does not."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from megajax.config import Config, InputError, TokenizerConfig, check_config, dump_config, load_config
from megajax.config.load import dump_run
from megajax.corpus.prepare import own_tokenizer
from megajax.data.tokenizers import build_tokenizer
from megajax.interop.imported import ParamsWriter, staged_directory
from megajax.interop.megatron.arguments import read_architecture
from megajax.interop.megatron.read import is_bert, open_checkpoint, pieces, shapes
from megajax.training.run_directory import RunDirectory

log = logging.getLogger(__name__)


def import_megatron(source: Path, out: Path, words: Sequence[str] = (), ignored: Collection[str] = ()) -> None:
    """Make a run of a checkpoint of Megatron-LM, of any tensor, pipeline and virtual pipeline size.

    Args:
        source: folder with latest_checkpointed_iteration.txt, or one iteration of it.
        out: directory of the run, which must not exist.
        words: `KEY=VALUE` words that the checkpoint does not say: `tokenizer.*`, and `model.vocab_size`, without which
            all rows of its padded vocabulary count.
        ignored: names of arguments of the checkpoint, unknown here, that leave the model alone.

    Raises:
        InputError: PyTorch is missing, the files are damaged, or the model has no counterpart here.
    """
    files = open_checkpoint(source)
    architecture = read_architecture(files.args, ignored, bert=is_bert(files))
    model = architecture.model
    with staged_directory(out) as staged:
        rows = model.vocab_size or 1
        ids = TokenizerConfig(type="null", vocab_size=rows - 1)  # and one that ends documents
        given = Config(output_dir=str(out), model=model, tokenizer=ids)
        file = staged / "config.yaml"
        file.write_text(dump_config(given), encoding="utf-8")
        length = min(getattr(files.args, "seq_length", model.max_positions), model.max_positions)
        config = load_config(file, [f"data.seq_length={length}", *words]).config
        config = replace(config, tokenizer=own_tokenizer(config.tokenizer, staged))
        tokenizer = build_tokenizer(config.tokenizer)
        size = config.model.vocab_size or rows
        if size > rows:
            raise InputError(f"model.vocab_size is {size}, the checkpoint has {rows} rows: lower it")
        check_config(config)
        file.write_text(dump_run(config, staged), encoding="utf-8")
        RunDirectory(staged).identify()
        log.info("%d of %d rows of the vocabulary count; the optimizer's state is left behind", size, rows)
        kind = getattr(files.args, "moe_router_load_balancing_type", "aux_loss")
        if model.balance_loss and kind != "seq_aux_loss":
            log.info("the balance of experts is that of a sequence here (seq_aux_loss); it was trained with %s", kind)

        stored = replace(config.model, vocab_multiple=1)
        writer = ParamsWriter(staged / "checkpoints")
        for name, shape in shapes(stored).items():
            writer.create(name, shape, depth=int(name.startswith("blocks.")))
        for name, index, value in pieces(files, architecture._replace(model=stored)):
            writer.put(name, index, value)
        writer.finish({"consumed_samples": 0, "tokenizer": tokenizer.identity, "imported": "megatron"})
