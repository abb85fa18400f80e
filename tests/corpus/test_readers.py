import bz2
import gzip
import json
import lzma
import os
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from megajax.config import InputError
from megajax.corpus.readers import Part, can_be_cut, input_files, optional, read_documents, read_part, whole

RECORDS = b'{"text": "one"}\n{"text": "two"}\n'


def texts(part: Part, text_documents: str = "file") -> list[str]:
    return [text for record in read_part(part, ["text"], text_documents) for text in record.texts(["text"])]


def test_gzip_of_several_members_and_several_files(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(RECORDS)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(RECORDS) + gzip.compress(b'{"text": "three"}\n'))

    assert list(read_documents([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"])) == [
        "one",
        "two",
        "one",
        "two",
        "three",
    ]


@pytest.mark.parametrize(("ending", "packer"), [(".bz2", bz2), (".xz", lzma)])
def test_bzip2_and_xz_of_several_streams(tmp_path: Path, ending: str, packer: ModuleType):
    """They were said to be no JSON."""
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(packer.compress(RECORDS) + packer.compress(b'{"text": "three"}\n'))
    assert list(read_documents([path])) == ["one", "two", "three"]
    path.write_bytes(packer.compress(RECORDS)[:-6])
    with pytest.raises(InputError, match=rf"a\.jsonl\{ending}: cannot be read"):
        list(read_documents([path]))


def test_archives_and_misnamed_files_are_refused_by_name(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(RECORDS)
    with zipfile.ZipFile(tmp_path / "zip.jsonl", "w") as archive:
        archive.write(tmp_path / "a.jsonl")
    for name, mode in (("tar.jsonl", "w"), ("a.tar.gz", "w:gz"), ("a.tar.xz", "w:xz"), ("tar.txt.bz2", "w:bz2")):
        with tarfile.open(tmp_path / name, mode) as archive:
            archive.add(tmp_path / "a.jsonl", "a.jsonl")
    (tmp_path / "seven.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(26))
    (tmp_path / "gz.jsonl").write_bytes(gzip.compress(RECORDS))
    (tmp_path / "bz2.jsonl").write_bytes(bz2.compress(RECORDS))
    problems = {
        "zip.jsonl": "a ZIP archive", "seven.7z": "a 7z archive", "tar.jsonl": "a tar archive",
        "a.tar.gz": "a tar archive", "a.tar.xz": "a tar archive", "tar.txt.bz2": "a tar archive",
        "gz.jsonl": r"packed, but not named so: rename it to gz\.jsonl\.gz",
        "bz2.jsonl": r"packed, but not named so: rename it to bz2\.jsonl\.bz2",
    }  # fmt: skip
    for name, problem in problems.items():
        with pytest.raises(InputError, match=f"{name} is {problem}"):
            list(read_documents([tmp_path / name]))


def test_folders_and_patterns(tmp_path: Path):
    """A folder is no file, but what it holds is said; a pattern is all files that match, by name."""
    for name in ("b.jsonl", "a.jsonl", "c[1].jsonl", "notes.md"):
        (tmp_path / name).write_bytes(RECORDS)
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(
        InputError, match=rf"is a folder: name the files in it \(3 \.jsonl, 1 \.md\), as in '{tmp_path}/\*"
    ):
        whole(tmp_path)
    with pytest.raises(InputError, match=r"\*\.csv: no file matches"):
        input_files([tmp_path / "*.csv"])
    found = input_files([tmp_path / "[ab].jsonl", tmp_path / "c[1].jsonl", tmp_path / "notes.md"])
    assert [Path(path).name for path in found] == ["a.jsonl", "b.jsonl", "c[1].jsonl", "notes.md"]


def test_a_pipe_is_refused(tmp_path: Path):
    """Its first line alone would have been read: what has no size has no parts."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is no regular file"):
        whole(tmp_path / "pipe")


def test_zstandard_of_several_frames(tmp_path: Path):
    zstd = pytest.importorskip("backports.zstd")
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(RECORDS) + zstd.compress(RECORDS))

    assert list(read_documents([tmp_path / "a.jsonl.zst"])) == ["one", "two"] * 2


@pytest.mark.parametrize("cut", [0, 12], ids=["not zstandard", "torn"])
def test_zstandard_that_cannot_be_read_is_named(tmp_path: Path, cut: int):
    zstd = pytest.importorskip("backports.zstd")
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(RECORDS)[:-4] if cut else RECORDS)

    with pytest.raises(InputError, match=r"a\.jsonl\.zst: cannot be read"):
        list(read_documents([tmp_path / "a.jsonl.zst"]))


def test_parquet_rows_are_documents(tmp_path: Path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"row {i}" for i in range(300)], "other": [b"bytes \xe4"] * 300, "number": range(300)})
    parquet.write_table(table, path, row_group_size=100)

    assert list(read_documents([path])) == [f"row {i}" for i in range(300)]
    for key, message in {
        "other": 'key "other" holds no UTF-8',
        "number": 'key "number" holds no text but 0',
        "words": r'no key "words" \(the record has: text, other, number\)',
    }.items():
        with pytest.raises(InputError, match=rf"a\.parquet:1: {message}"):
            list(read_documents([path], key))
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read"):
        list(read_documents([path]))


def test_a_text_file_is_a_document_or_has_one_per_line(tmp_path: Path):
    path, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    path.write_bytes(b"\xef\xbb\xbf  first line\r\n\nlast line")
    packed.write_bytes(gzip.compress(path.read_bytes()))

    for part in (Part(path, 0, path.stat().st_size), Part(packed, 0, packed.stat().st_size)):
        assert texts(part) == ["  first line\r\n\nlast line"]
        assert texts(part, "line") == ["  first line", "last line"]


def test_text_that_is_not_utf8_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"na\xefve")

    with pytest.raises(InputError, match=r'a\.txt: key "text" holds no UTF-8'):
        list(read_documents([tmp_path / "a.txt"]))


@pytest.mark.parametrize("size", range(1, 40))
def test_parts_of_any_size_hold_every_line_once(tmp_path: Path, size: int):
    """A line belongs to the part that holds the line end before it; places count from the start of the file."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf1\n\n22\r\n\n\n" + b"3" * 25 + b"\n4\n55555")
    end = path.stat().st_size
    parts = [Part(path, start, min(start + size, end)) for start in range(0, end, size)]
    records = [record for part in parts for record in read_part(part, ["text"])]

    assert [record.content for record in records] == [b"1", b"22", b"3" * 25, b"4", b"55555"]
    assert [record.where for record in records] == [f"{path}:{line}" for line in (1, 3, 6, 7, 8)]
    assert all(record.position > record.part.start for record in records)


def test_only_files_with_lines_are_cut():
    cut = {
        name: can_be_cut(Path(name), "file") for name in ("a.jsonl", "a", "a.txt", "a.parquet", "a.jsonl.gz", "a.zst")
    }

    assert [name for name, can in cut.items() if can] == ["a.jsonl", "a"]
    assert can_be_cut(Path("a.txt"), "line")


def test_missing_library_is_named():
    with pytest.raises(InputError, match=r"a\.zst: reading it needs no_such_module: pip install 'megajax\[data\]'"):
        optional("no_such_module", "a.zst: reading it")


def test_lists_of_texts_only_where_asked_for(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": ["one", "two"]}))
    [record] = read_part(Part(path, 0, 99), ["text"])

    assert record.texts(["text"], lists=True) == [["one", "two"]]
    with pytest.raises(InputError, match=r'key "text" holds no text but \["one", "two"\]'):
        record.texts(["text"])
