from pathlib import Path

import numpy as np
import pytest

from megajax.config import InputError
from megajax.corpus.token_files import describe_token_files, merge_token_files, prefixes_in
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.tokenizers import NullTokenizer


def test_merged_pair_is_that_of_all_documents(tmp_path: Path):
    """Documents of two sentences, of none and of one, cut into pairs anywhere, one of them without documents."""
    documents = [([5, 6, 7], [2, 1]), ([], []), ([8], [1]), ([9, 10], [2])]
    for name, part in {"all": documents, "a": documents[:2], "b": [], "c": documents[2:]}.items():
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            for tokens, lengths in part:
                writer.add_document(tokens, lengths)
    merge_token_files([tmp_path / name for name in "abc"], tmp_path / "merged")

    for suffix in ("bin", "idx"):
        assert (tmp_path / f"merged.{suffix}").read_bytes() == (tmp_path / f"all.{suffix}").read_bytes()
    merged = IndexedDataset(tmp_path / "merged")
    assert merged.document_index.tolist() == [0, 2, 2, 3, 4]
    assert merged.pointers.tolist() == [0, 4, 6, 8]


def test_token_types_are_not_mixed(write_documents, tmp_path: Path):
    write_documents([[1]], "a", np.uint16)
    write_documents([[1]], "b", np.int32)

    with pytest.raises(InputError, match=r"b: holds int32 tokens, .*a uint16"):
        merge_token_files([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


def test_folder_stands_for_its_pairs_by_name(write_documents, tmp_path: Path):
    for name in ("b.2", "a", "c"):
        write_documents([[1]], name)

    assert prefixes_in(tmp_path) == [tmp_path / name for name in ("a", "b.2", "c")]
    assert prefixes_in(tmp_path / "a") == [tmp_path / "a"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: no token files"):
        prefixes_in(tmp_path / "empty")


def test_description(write_documents, tmp_path: Path):
    write_documents([[5, 6, 7], [], [8]])

    assert describe_token_files(tmp_path / "corpus", NullTokenizer(9)).splitlines() == [
        f"{tmp_path}/corpus: uint16 tokens, 8 bytes",
        "documents  3 (1 empty), 2 sequences, 4 tokens",
        "tokens per document: mean 1.3, shortest 0, 10 % 0, median 1, 90 % 3, 99 % 3, longest 3",
        "tokens per sequence: mean 2.0, shortest 1, 10 % 1, median 1, 90 % 3, 99 % 3, longest 3",
        "document 0:",
        "    '5 6 7'",
        "document 2:",
        "    '8'",
    ]
    assert "    5 6 7" in describe_token_files(tmp_path / "corpus").splitlines()
