"""`python -m megajax.preprocess` as a whole: interruptions, other formats, merging and showing."""

import fcntl
import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import sentencepiece

from bench import kill_preprocessing
from megajax import preprocess as command
from megajax.config import InputError, TokenizerConfig
from megajax.corpus import workers
from megajax.corpus.corpus import preprocess, preprocess_keys
from megajax.corpus.readers import whole
from megajax.corpus.shards import Job, Options, Shard, ShardWriter, plan_shards
from megajax.data.indexed import IndexedDataset
from megajax.data.tokenizers import build_tokenizer, train_sentencepiece

NULL = TokenizerConfig(type="null", vocab_size=1000)
FLAGS = ["--tokenizer-type", "null", "--vocab-size", "1000"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three shards' worth of documents under two keys."""
    path = tmp_path / "corpus.jsonl"
    lines = (json.dumps({"text": " ".join([str(i % 1000)] * 90), "more": str(i % 7)}) for i in range(8_000))
    path.write_text("\n".join(lines))
    return path


def output(directory: Path, name: str) -> dict[str, bytes]:
    return {path.name.removeprefix(name): path.read_bytes() for path in directory.glob(f"{name}_*.*")}


@pytest.mark.slow
def test_killed_runs_are_continued_to_the_same_bytes(tmp_path: Path):
    results = kill_preprocessing.kill_and_continue(tmp_path, kills=3, documents=20_000, workers=2, seed=1)

    assert [same for *_, same in results] == [True] * 3


def test_any_number_of_workers_gives_the_same_bytes_for_every_key(tmp_path: Path, corpus: Path):
    """Several keys at once: every pair is finished."""
    options = Options(keys=("text", "more"))
    alone = preprocess_keys([corpus, corpus], tmp_path / "alone", NULL, options)
    preprocess_keys([corpus, corpus], tmp_path / "together", NULL, options, workers=3)

    assert output(tmp_path, "alone") == output(tmp_path, "together")
    assert set(output(tmp_path, "alone")) == {
        f"_{key}_document.{s}" for key in ("text", "more") for s in ("bin", "idx", "ids.json")
    }
    assert [report.documents for report in alone] == [16_000, 16_000]
    assert not (tmp_path / "alone_shards").exists()


def test_finished_shards_are_not_made_again_unless_something_changed(tmp_path: Path, corpus: Path, caplog):
    caplog.set_level("INFO")
    tokenizer = build_tokenizer(NULL)
    shards = plan_shards([corpus], Options(), tokenizer)
    job = Job(tmp_path / "out_shards", NULL, Options())
    job.directory.mkdir()
    (job.directory / f".{'0' * 24}-0.bin.{'1' * 32}").write_bytes(b"half a shard")
    ShardWriter(job)(shards[0], lambda read, documents: None)
    preprocess([corpus], tmp_path / "out", NULL)
    preprocess([corpus], tmp_path / "undisturbed", NULL)

    assert len(shards) == 3
    assert (
        caplog.messages[0]
        == f"{tmp_path}/out_shards: continuing, {100 * shards[0].size / corpus.stat().st_size:.0f}% is there already"
    )
    assert output(tmp_path, "out") == output(tmp_path, "undisturbed")
    others = [
        plan_shards([corpus], Options(append_eod=False), tokenizer),
        plan_shards([corpus], Options(), build_tokenizer(TokenizerConfig(type="null", vocab_size=999))),
    ]
    os.utime(corpus, (1, 1))
    others.append(plan_shards([corpus], Options(), tokenizer))
    assert all(shards[0].name != other[0].name for other in others)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, corpus: Path):
    """The inputs themselves may lie where the shards would."""
    folder = tmp_path / "out_shards"
    folder.mkdir()
    part = corpus.rename(folder / "part-0.jsonl")
    with pytest.raises(InputError, match=r"holds part-0\.jsonl: choose another --output-prefix"):
        preprocess([part], tmp_path / "out", NULL)
    assert [path.name for path in folder.iterdir()] == ["part-0.jsonl"]


def test_a_bad_line_keeps_what_is_finished_for_a_run_that_skips(tmp_path: Path, corpus: Path):
    """Named by its place in the whole file, also from a shard further on."""
    lines = corpus.read_text().splitlines()
    lines[7_000] = '{"content": "1"}'
    corpus.write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"corpus\.jsonl:7001: no key \"text\""):
        preprocess([corpus], tmp_path / "out", NULL)

    assert not list(tmp_path.glob("*.idx"))
    assert len(list((tmp_path / "out_shards").glob("*[!s].json"))) == 2  # not PREFIX.ids.json
    report = preprocess([corpus], tmp_path / "out", NULL, on_bad_line="skip")
    assert (report.documents, report.skipped) == (7_999, 1)


def test_records_bad_under_one_key_are_left_out_under_all(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "1", "b": "2"}\n{"a": "3"}\n{"a": "4", "b": "x"}\n{"a": "5", "b": "6"}\n')
    options = Options(keys=("a", "b"), append_eod=False, on_bad_line="skip")
    reports = preprocess_keys([path], tmp_path / "out", NULL, options)

    tokens = [[IndexedDataset(report.prefix)[i].tolist() for i in range(2)] for report in reports]
    assert tokens == [[[1], [5]], [[2], [6]]]
    assert [report.skipped for report in reports] == [2, 2]


def test_a_second_run_at_the_same_place_is_refused(tmp_path: Path, corpus: Path):
    (tmp_path / "out_shards").mkdir()
    with (tmp_path / "out_shards" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="out_shards: another process is at work there"):
            preprocess([corpus], tmp_path / "out", NULL)


def run(*arguments: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    shell = f"ulimit -f {limit}; trap '' XFSZ; " if limit else ""
    words = [sys.executable, "-m", "megajax.preprocess", *arguments]
    return subprocess.run(
        ["bash", "-c", f'{shell}exec "$@"', "bash", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_no_room_is_one_line_and_code_2(tmp_path: Path, corpus: Path, workers: str):
    """Files are limited to 64 KiB, which an id of two bytes ninety times a document soon exceeds."""
    done = run("--input", str(corpus), "--output-prefix", f"{tmp_path}/out", "--workers", workers, *FLAGS, limit=64)

    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert "File too large; make room or check the path and run again" in line
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_worker_that_died_before_its_next_shard_is_no_broken_pipe(tmp_path: Path, corpus: Path):
    """The parent may notice while it hands out work, not only while it waits."""
    job = Job(tmp_path / "shards", NULL, Options())
    connection, process = workers._start(job)
    process.kill()
    process.join()
    with pytest.raises(InputError, match=r"a worker process ended early \(killed by SIGKILL"):
        workers._send(connection, process, Shard("name", (whole(corpus),)))


def test_killed_worker_is_one_line_and_code_2(tmp_path: Path, corpus: Path):
    big = tmp_path / "big.jsonl"
    big.write_bytes((corpus.read_bytes() + b"\n") * 10)
    words = ["--input", str(big), "--output-prefix", f"{tmp_path}/out", "--workers", "2", *FLAGS]
    process = psutil.Popen([sys.executable, "-m", "megajax.preprocess", *words], stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out_shards/*[!s].json")):
        assert process.poll() is None
    workers = [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]
    workers[0].send_signal(signal.SIGKILL)
    _, errors = process.communicate()

    [line] = errors.splitlines()
    assert process.returncode == 2
    assert "a worker process ended early (killed by SIGKILL" in line
    assert not list(tmp_path.glob("*.idx"))


def test_sentences_are_sequences(tmp_path: Path):
    pytest.importorskip("nupunkt")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1 2. 3."}\n'.replace("1 2. 3.", "10 20\\n\\n30") + '{"text": ["1 2", "", "3"]}\n')
    words = ["--input", str(path), "--output-prefix", f"{tmp_path}/out", "--split-sentences", *FLAGS]

    assert command.main(words) == 0
    indexed = IndexedDataset(tmp_path / "out_text_sentence")
    assert indexed.lengths.tolist() == [2, 1, 2, 1]
    assert indexed.document_index.tolist() == [0, 2, 4]
    assert command.main([*words, "--append-eod"]) == 0
    assert IndexedDataset(tmp_path / "out_text_sentence").lengths.tolist() == [2, 2, 2, 2]


def test_lists_of_texts_are_sequences_without_being_asked_for(tmp_path: Path):
    """As Megatron-LM takes them; they needed --split-sentences."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ["1 2", "", "3"]}\n{"text": "4"}\n')
    assert command.main(["--input", str(path), "--output-prefix", f"{tmp_path}/out", *FLAGS]) == 0
    indexed = IndexedDataset(tmp_path / "out_text_document")
    assert [indexed[i].tolist() for i in range(3)] == [[1, 2], [3, 1000], [4, 1000]]
    assert indexed.document_index.tolist() == [0, 2, 3]


def test_merge_and_inspect(tmp_path: Path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("1 2 3\n4\n")
        words = ["--input", f"{tmp_path}/{name}.txt", "--output-prefix", f"{tmp_path}/{name}", *FLAGS]
        assert command.main([*words, "--text-documents", "line"]) == 0
    both = [f"{tmp_path}/{name}_text_document" for name in ("a", "b")]
    assert command.main(["--merge", *both, "--output-prefix", f"{tmp_path}/all"]) == 0
    capsys.readouterr()

    assert command.main(["--inspect", f"{tmp_path}/all", *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "documents  4 (0 empty), 4 sequences, 12 tokens"
    assert lines[4:6] == ["document 0:", "    '1 2 3 1000'"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "a.jsonl"], "--output-prefix is not set"),
        (["--output-prefix", "out"], "--input is not set"),
        (["--inspect", "nowhere"], "nowhere.bin: no such file"),
        (["--merge", "nowhere", "--output-prefix", "out"], "nowhere.bin: no such file"),
    ],
)
def test_what_is_missing_is_said_in_one_line(capsys, arguments: list[str], message: str):
    assert command.main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


LOSSY = {"model_type": "unigram", "vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2}


def lossy_model(path: Path) -> Path:
    """SentencePiece's own defaults, which T5 has."""
    model = io.BytesIO()
    lines = iter(["hello world and all the others", "the world says hello"])
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **LOSSY)
    path.write_bytes(model.getvalue())
    return path


def test_what_a_tokenizer_loses_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Once, by name, with the number of texts that lose something."""
    texts = ["hello\nworld", "hello  world", "hello world", "the\tothers"] * 30
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = TokenizerConfig(type="sentencepiece", model=str(lossy_model(tmp_path / "t5.model")))
    with caplog.at_level(logging.WARNING):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "lossy", tokenizer)
    [message] = caplog.messages
    assert message.startswith(
        "the tokenizer reads line ends, tabs, double spaces as single spaces: 75 of the first 100 texts lose some"
    )
    caplog.clear()
    train_sentencepiece(["hello world"], tmp_path / "own.model", 270)
    with caplog.at_level(logging.WARNING):
        own = TokenizerConfig(type="sentencepiece", model=str(tmp_path / "own.model"))
        preprocess([tmp_path / "a.jsonl"], tmp_path / "own", own)
        preprocess([tmp_path / "a.jsonl"], tmp_path / "masked", tokenizer, append_eod=False, split_sentences=True)
    assert not caplog.records


def test_showing_with_another_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One line for ids that it lacks, whatever the library would say."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "1 999 3"}))
    preprocess([tmp_path / "a.jsonl"], tmp_path / "a", NULL)
    model = str(lossy_model(tmp_path / "t5.model"))
    words = ["--inspect", f"{tmp_path / 'a'}_text_document", "--tokenizer-type", "sentencepiece"]
    assert command.main([*words, "--tokenizer-model", model]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "a_text_document.bin: token id 1000 outside the vocabulary of" in last
