"""Ids that the vocabulary lacks are found before training, or soon after its start, also in hundreds of open files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megajax.config import DataConfig, InputError
from megajax.corpus.token_files import merge_token_files
from megajax.data import vocabulary
from megajax.data.build import build_datasets
from megajax.data.indexed import Index, IndexedDataset, IndexedWriter, write_index
from megajax.data.samples import Recipe
from megajax.data.tokenizers import NullTokenizer
from megajax.data.vocabulary import VocabularyScan

TOKENIZER = NullTokenizer(999)
ROOT = Path(__file__).parents[2]


def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for tokens in documents:
            writer.add_document(tokens)


def train_on(*prefixes: Path, seq_length: int = 4):
    config = DataConfig(seq_length=seq_length, path=tuple(map(str, prefixes)), split="1")
    return build_datasets(Recipe(config, TOKENIZER), {"train": 8}, seed=1)["train"]


@pytest.mark.parametrize("noted", [True, False])
def test_a_large_id_is_found_before_a_sample_is_read(tmp_path: Path, noted: bool) -> None:
    """In files of ours by the note beside them, in others by looking."""
    write(tmp_path / "good", [[1, 2, 3, 999]] * 20)
    write(tmp_path / "bad", [[1, 2], [], [3, 1001, 4, 1000]] + [[5, 6]] * 20)
    if not noted:
        (tmp_path / "bad.ids.json").unlink()
    train_on(tmp_path / "good")
    message = r"bad.bin: token id 1001 outside the vocabulary of 1000 \(document 2\); the file was written with"
    with pytest.raises(InputError, match=message):
        train_on(tmp_path / "good", tmp_path / "bad")


def test_a_negative_id_is_found(tmp_path: Path) -> None:
    write(tmp_path / "corpus", [[1, 2], [3, -7, 4]], "<i4")
    with pytest.raises(InputError, match=r"token id -7 outside the vocabulary of 1000 \(document 1\)"):
        train_on(tmp_path / "corpus")


def test_the_first_half_gib_is_looked_through_at_the_start_and_the_rest_with_every_batch(tmp_path: Path) -> None:
    """600 MiB of zeros that take no room on the disk, with one wrong id at their end."""
    tokens = 300 << 20
    index = (np.array([tokens], np.int32), np.array([0], np.int64), np.array([0, 1], np.int64))
    with (tmp_path / "large.bin").open("wb") as file:
        file.seek(2 * (tokens - 5))
        file.write(np.array([0, 5000, 0, 0, 0], "<u2").tobytes())
    with (tmp_path / "large.idx").open("wb") as file:
        write_index(file, lambda: [Index(np.dtype("<u2"), *index)])
    data = train_on(tmp_path / "large", seq_length=1 << 20)
    with pytest.raises(InputError, match="token id 5000 outside the vocabulary of 1000"):
        for _ in range(8):
            data.batch(np.array([0]))


@pytest.mark.parametrize("at_start", [1 << 29, 16])
def test_every_piece_is_looked_through_by_one_of_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_start: int
) -> None:
    """Two files of 41 tokens, 4 tokens a piece, three processes; at the start, or with batches."""
    monkeypatch.setattr(vocabulary, "_WITH_A_BATCH", 8)
    monkeypatch.setattr(vocabulary, "_AT_START", at_start)
    found = []
    for place in (0, 3, 4, 17, 40, 41, 44, 63, 81):
        tokens = np.zeros(82, int)
        tokens[place] = 5000
        for name, part in (("a", tokens[:41]), ("b", tokens[41:])):
            write(tmp_path / name, [part.tolist()])
            (tmp_path / f"{name}.ids.json").unlink()
        finders = []
        for process in range(3):
            scan = VocabularyScan(1000)
            for name in "ab":
                scan.add(IndexedDataset(tmp_path / name))
            try:
                scan.start((process, 3))
                for _ in range(30):
                    scan.go_on()
            except InputError:
                finders.append(process)
        found.append(len(finders))
    assert found == [1] * 9


def test_a_note_is_of_its_own_contents(tmp_path: Path) -> None:
    """Somebody else's pair under the same name is looked through, whatever note lies beside it."""
    write(tmp_path / "corpus", [[1, 2, 3, 4]] * 3)
    write(tmp_path / "other", [[1, 2, 3, 5000]] * 3)
    for suffix in ("bin", "idx"):
        shutil.copy(tmp_path / f"other.{suffix}", tmp_path / f"corpus.{suffix}")
    with pytest.raises(InputError, match="token id 5000"):
        train_on(tmp_path / "corpus")


def test_merged_files_have_a_note(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    write(tmp_path / "b", [[4, 700], [5]])
    merge_token_files([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    write(tmp_path / "wanted", [[1, 2], [3], [4, 700], [5]])
    for suffix in ("bin", "idx", "ids.json"):
        assert (tmp_path / f"both.{suffix}").read_bytes() == (tmp_path / f"wanted.{suffix}").read_bytes()


def test_a_folder_in_the_place_of_a_prefix_says_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "corpus_text_document", [[1, 2]])
    with pytest.raises(InputError, match=f"{tmp_path} is a folder: .* such as {tmp_path}/corpus_text_document"):
        IndexedDataset(tmp_path)


def test_a_sequence_longer_than_the_format_can_say_is_refused(tmp_path: Path) -> None:
    """2^31 tokens, of one number that stands for all."""
    tokens = np.broadcast_to(np.uint16(1), (2**31,))
    with (
        pytest.raises(InputError, match="a sequence of 2147483648 tokens; the format holds 2147483647: cut it up"),
        IndexedWriter(tmp_path / "corpus", np.dtype("<u2")) as writer,
    ):
        writer.add_document(tokens)
    assert list(tmp_path.iterdir()) == []


def test_more_sources_than_descriptors(tmp_path: Path) -> None:
    """300 sources, their sample orders built and then mapped, under a limit of 256 open files."""
    for number in range(300):
        write(tmp_path / str(number), [[number, 1, 2, 3, 4, 5]] * 2)
    program = f"""
import numpy as np
from megajax.config import DataConfig
from megajax.data.build import build_datasets
from megajax.data.samples import Recipe
from megajax.data.tokenizers import NullTokenizer
from megajax.data.vocabulary import VocabularyScan
paths = tuple(word for i in range(300) for word in ("1", f"{tmp_path}/{{i}}"))
for _ in range(2):
    config = DataConfig(seq_length=4, path=paths, split="1")
    data = build_datasets(Recipe(config, NullTokenizer(999)), {{"train": 600}}, seed=1)["train"]
    batch = data.batch(np.arange(600))
    print(len({{int(n) for n in batch["tokens"].ravel() if n > 5}}))
"""
    command = ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["294", "294"], done.stderr
