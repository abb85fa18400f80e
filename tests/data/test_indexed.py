import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megajax.config import InputError
from megajax.data.indexed import IndexedDataset, IndexedWriter, byte_pointers, token_dtype

HEADER = struct.Struct("<9sQBQQ")


def test_files_equal_hand_packed_bytes(tmp_path: Path):
    """Three documents: of two sentences, without a token, of one sentence."""
    with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        writer.add_document([5, 6, 7], lengths=[2, 1])
        writer.add_document([])
        writer.add_document([8, 65535])

    assert (tmp_path / "corpus.bin").read_bytes() == struct.pack("<5H", 5, 6, 7, 8, 65535)
    assert (tmp_path / "corpus.idx").read_bytes() == b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<QBQQ", 1, 8, 3, 4),
            struct.pack("<3i", 2, 1, 2),
            struct.pack("<3q", 0, 4, 6),
            struct.pack("<4q", 0, 2, 2, 3),
        ]
    )


def test_reads_what_was_written(write_documents):
    indexed = write_documents([[5, 6, 7], [8], [9, 10]], dtype=np.int32)

    assert len(indexed) == 3
    assert [indexed[i].tolist() for i in range(3)] == [[5, 6, 7], [8], [9, 10]]
    assert indexed.get(0, offset=1).tolist() == [6, 7]
    assert indexed.get(0, offset=1, length=1).tolist() == [6]
    assert indexed.get(2, length=99).tolist() == [9, 10]
    assert (indexed.dtype, indexed.lengths.dtype, indexed.pointers.dtype) == (np.int32, np.int32, np.int64)
    assert indexed.pointers.tolist() == [0, 12, 16]
    assert indexed.document_index.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        indexed[0][0] = 1


def test_files_without_documents_or_tokens_open(write_documents):
    assert len(write_documents([])) == 0
    assert write_documents([[], []]).document_index.tolist() == [0, 0, 0]


def test_token_width_follows_megatron():
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_pointers_exceed_32_bits():
    lengths = np.full(3, 2**30, np.int32)

    assert byte_pointers(lengths, 2).tolist() == [0, 2147483648, 4294967296]


def test_width_comes_from_the_header_and_is_checked_against_the_tokens(write_documents, tmp_path: Path):
    """A 16-bit file reads fine whatever the vocabulary; a wrong dtype byte is refused with both sizes."""
    indexed = write_documents([[1, 2, 3], [4]])
    assert indexed[0].dtype == np.uint16

    raw = bytearray((tmp_path / "corpus.idx").read_bytes())
    raw[17] = 4
    (tmp_path / "corpus.idx").write_bytes(raw)
    with pytest.raises(InputError, match=r"corpus\.bin: shorter than the index says: 8 bytes found, 16 expected"):
        IndexedDataset(tmp_path / "corpus")


def pack_index(
    magic: bytes = b"MMIDIDX\0\0",
    version: int = 1,
    code: int = 8,
    counts: tuple[int, int] = (2, 3),
    lengths: tuple[int, int] = (3, 1),
    pointers: tuple[int, int] = (0, 6),
    document_index: tuple[int, int, int] = (0, 1, 2),
) -> bytes:
    header = HEADER.pack(magic, version, code, *counts)
    return header + struct.pack("<2i", *lengths) + struct.pack("<2q", *pointers) + struct.pack("<3q", *document_index)


DAMAGE = {
    "magic": (pack_index(magic=b"TNTIDX\0\0\0"), "not a Megatron index"),
    "version": (pack_index(version=2), "version 2 of the index format"),
    "dtype": (pack_index(code=99), "dtype code 99 is no token type"),
    "cut in the header": (pack_index()[:20], "20 bytes are less than the 34 of a header"),
    "cut in the lengths": (pack_index()[:38], "38 bytes found, 82 expected for 2 sequences"),
    "count": (pack_index(counts=(2**60, 3)), f"82 bytes found, {34 + 12 * 2**60 + 24} expected for {2**60} sequences"),
    "negative length": (pack_index(lengths=(-1, 5)), "sequence 0 has a negative length"),
    "pointers": (pack_index(pointers=(0, 4)), "byte offsets do not add up"),
    "first document": (pack_index(document_index=(1, 1, 2)), "does not run from 0 to the 2 sequences"),
    "last document": (pack_index(document_index=(0, 1, 1)), "does not run from 0 to the 2 sequences"),
    "document order": (pack_index(document_index=(0, 3, 2)), "goes backwards"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_index_is_refused_by_name(write_documents, tmp_path: Path, content: bytes, message: str):
    write_documents([[1, 2, 3], [4]])
    assert (tmp_path / "corpus.idx").read_bytes() == pack_index()

    (tmp_path / "corpus.idx").write_bytes(content)
    with pytest.raises(InputError, match=rf"corpus\.idx: .*{message}"):
        IndexedDataset(tmp_path / "corpus")


@pytest.mark.parametrize(("content", "size"), [(bytes(6), "shorter"), (bytes(10), "longer"), (b"", "shorter")])
def test_bin_of_another_size_is_refused(write_documents, tmp_path: Path, content: bytes, size: str):
    write_documents([[1, 2, 3], [4]])
    (tmp_path / "corpus.bin").write_bytes(content)

    with pytest.raises(InputError, match=f"{size} than the index says: {len(content)} bytes found, 8 expected"):
        IndexedDataset(tmp_path / "corpus")


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"corpus\.bin\.bin: no such file; name token files without \.bin or \.idx"):
        IndexedDataset(tmp_path / "corpus.bin")


def test_ids_that_do_not_fit_leave_nothing_behind(tmp_path: Path):
    with (
        pytest.raises(InputError, match="token id 65536 does not fit uint16"),
        IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer,
    ):
        writer.add_document([1, 65536])

    assert list(tmp_path.iterdir()) == []


def test_failed_rewrite_keeps_the_old_pair(write_documents, tmp_path: Path):
    write_documents([[1, 2]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        writer.add_document([3])
        raise RuntimeError

    assert IndexedDataset(tmp_path / "corpus")[0].tolist() == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.bin", "corpus.ids.json", "corpus.idx"}


def test_leftovers_of_a_killed_writer_go_and_living_ones_stay(tmp_path: Path):
    """A kill during the final merge left `.corpus.bin.<hex>` behind for ever."""
    program = f"""
import os, signal, numpy as np
from megajax.data.indexed import IndexedWriter
with IndexedWriter({str(tmp_path / "corpus")!r}, np.dtype("<u2")) as writer:
    writer.add_document([1, 2])
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False, timeout=60)
    assert len(list(tmp_path.iterdir())) == 2
    with IndexedWriter(tmp_path / "corpus", np.dtype("<u2")) as first:
        first.add_document([1])
        with IndexedWriter(tmp_path / "corpus", np.dtype("<u2")) as second:
            assert len(list(tmp_path.iterdir())) == 4
            second.add_document([2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.ids.json", "corpus.idx"]
    assert IndexedDataset(tmp_path / "corpus")[0].tolist() == [1]
