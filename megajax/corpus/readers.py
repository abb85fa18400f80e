"""Readers of documents in text files, whole or in parts, in memory that does not grow with the file.

| Name ends with          | A document is                                          | Read in parts |
| ----------------------- | ------------------------------------------------------ | ------------- |
| .txt                    | the file; with `text_documents="line"` a line          | by lines      |
| .parquet                | a row                                                  | no            |
| anything else (.jsonl)  | a line, a JSON record                                  | yes           |

All files but Parquet may be packed (.gz, .zst, .bz2, .xz) and are then read as a whole; archives are refused. Text
files give records with the key `text`. Lines end only at LF: U+2028 and other line separators may stand inside a JSON
string. A byte-order mark, CR before LF, blank lines and a missing last LF are all accepted.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from megajax.config.base import InputError
from megajax.observe.progress import InputProgress

TextDocuments = Literal["file", "line"]
_BUFFER = 1 << 20
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".lzma")
_PACKERS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"}
"""First bytes of packed files, and the ending that such a file's name must have."""
_ARCHIVES = {
    b"PK\3\4": "a ZIP archive",
    b"PK\5\6": "a ZIP archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a RAR archive",
}


class Part(NamedTuple):
    """A part of a file: the lines after any line end among its bytes. A file that cannot be cut is one part."""

    path: Path
    start: int
    end: int


class Record(NamedTuple):
    """One record of a part, not parsed yet."""

    part: Part
    number: int
    """Number of the line or row, from 1 at the start of the part; 0 = the record is the whole file."""
    position: int
    """Bytes of the file up to the end of the record, for progress."""
    content: bytes | Mapping[str, object]
    """Line of JSON, or values by key."""

    @property
    def where(self) -> str:
        """Return the place of the record, for messages; this reads the file up to its part."""
        if not self.number:
            return str(self.part.path)
        left = self.part.start
        number = self.number + bool(left)  # a later part starts within a line, which it leaves out
        with self.part.path.open("rb") as file:
            while piece := file.read(min(_BUFFER, left)):
                number += piece.count(b"\n")
                left -= len(piece)
        return f"{self.part.path}:{number}"

    def texts(self, keys: Iterable[str], lists: bool = False) -> list[str | list[str]]:
        """Return the values under some keys: texts, and lists of texts where `lists` allows them.

        Raises:
            InputError: the record has no text there; the message tells why.
        """
        record = _parse(self.content) if isinstance(self.content, bytes) else self.content
        return [_text(record, key, lists) for key in keys]


def input_files(names: Iterable[str | Path]) -> list[str]:
    """Return the files that some names stand for; a pattern (`corpus/*.jsonl.gz`) stands for its matches, sorted by
    name.

    Raises:
        InputError: nothing matches a name.
    """
    files = []
    for name in map(str, names):
        matching = [name]
        if re.search(r"[*?[]", name) and not Path(name).exists():
            found = glob.glob(name, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
            matching = sorted(path for path in found if Path(path).is_file())
            if not matching:
                raise InputError(f"{name}: no file matches")
        files += matching
    return files


def bare_name(path: str | Path) -> str:
    """Return the name of a file without the endings that tell its format."""
    endings = "|".join(map(re.escape, _PACKED))
    return re.sub(rf"(\.jsonl|\.txt|\.parquet)?({endings})?$", "", Path(path).name)


def whole(path: str | Path) -> Part:
    """Return all of a file as one part.

    Raises:
        InputError: the file is missing, is a folder or an archive, or is packed without such a name.
    """
    path = Path(path)
    with _naming(path):
        if path.is_dir():
            raise InputError(f"{path} is a folder: {_contents_of(path)}")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no regular file, which is read more than once: write it to one first")
        with path.open("rb") as file:
            start = file.read(512)
        _refuse_archive(path, start)
        for magic, ending in _PACKERS.items():
            if start.startswith(magic) and path.suffix != ending and not (ending == ".bz2" and b"1AY&SY" not in start):
                raise InputError(f"{path} is packed, but not named so: rename it to {path.name}{ending}")
        return Part(path, 0, path.stat().st_size)


def _contents_of(folder: Path) -> str:
    kinds = Counter("".join(path.suffixes[-2:]) for path in folder.iterdir() if path.is_file())
    if not kinds:
        return "without files"
    counts = ", ".join(f"{count} {kind or 'without an ending'}" for kind, count in kinds.most_common(3))
    return f"name the files in it ({counts}), as in '{folder}/*{kinds.most_common(1)[0][0]}'"


def _refuse_archive(path: Path, start: bytes) -> None:
    kinds = [kind for magic, kind in _ARCHIVES.items() if start.startswith(magic)]
    if start[257:262] == b"ustar":
        kinds.append("a tar archive")
    if kinds:
        raise InputError(f"{path} is {kinds[0]}: unpack it, and name the files that are in it")


def can_be_cut(path: Path, text_documents: TextDocuments) -> bool:
    """Tell whether a file has lines that can be found from any byte on."""
    one_document = path.suffix == ".txt" and text_documents == "file"
    return path.suffix not in (*_PACKED, ".parquet") and not one_document


def read_part(part: Part, keys: Sequence[str], text_documents: TextDocuments = "file") -> Iterator[Record]:
    """Iterate over the records of a part; records of Parquet files may hold `keys` alone.

    Raises:
        InputError: the file cannot be read.
    """
    with _naming(part.path), ExitStack() as stack:
        if part.path.suffix == ".parquet":
            yield from _rows(part, keys)
            return
        raw = stack.enter_context(part.path.open("rb", _BUFFER))
        packed = part.path.suffix in _PACKED
        file = raw
        if packed:
            file = stack.enter_context(_unpacked(raw, part.path.suffix))
            _refuse_archive(part.path, file.peek(512))
        name = part.path.stem if packed else part.path.name
        if not name.endswith(".txt"):
            lines = ((number, line.strip()) for number, line in _lines(file, part))
            yield from (Record(part, number, raw.tell(), line) for number, line in lines if line)
        elif text_documents == "line":
            lines = ((number, line.rstrip(b"\r\n")) for number, line in _lines(file, part))
            yield from (Record(part, number, raw.tell(), {"text": line}) for number, line in lines if line)
        else:
            text = file.read().removeprefix(codecs.BOM_UTF8)
            yield Record(part, 0, part.end, {"text": text})


def read_documents(paths: Iterable[str | Path], key: str = "text") -> Iterator[str]:
    """Iterate over the texts of some files.

    Raises:
        InputError: a file cannot be read or a record has no text.
    """
    parts = [whole(path) for path in paths]
    with InputProgress(sum(part.end for part in parts)) as progress:
        for part in parts:
            position = 0
            for record in read_part(part, [key]):
                progress.advance(read=record.position - position, documents=1)
                position = record.position
                try:
                    [text] = record.texts([key])
                except InputError as error:
                    raise InputError(f"{record.where}: {error}") from None
                yield str(text)


def optional(module: str, purpose: str) -> Any:
    """Import a library that only some corpora need.

    Raises:
        InputError: the library is not installed.
    """
    try:
        return import_module(module)
    except ImportError:
        raise InputError(f"{purpose} needs {module}: pip install 'megajax[data]'") from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in the error if it cannot be read."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # every format has errors of its own
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(f"{path}: cannot be read ({reason})") from None


def _unpacked(raw: BinaryIO, suffix: str) -> io.BufferedReader:
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _BUFFER)
    if suffix in (".bz2", ".xz", ".lzma"):
        return io.BufferedReader(bz2.BZ2File(raw) if suffix == ".bz2" else lzma.LZMAFile(raw), _BUFFER)
    zstd = optional("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", f"{raw.name}: reading it")
    return io.BufferedReader(zstd.ZstdFile(raw), _BUFFER)


def _lines(file: BinaryIO, part: Part) -> Iterator[tuple[int, bytes]]:
    """Number the lines that start in a part, or all lines of a packed file."""
    position = part.start
    if position:
        file.seek(position)
        position += len(file.readline())
    whole_file = part.path.suffix in _PACKED
    for number, line in enumerate(file, 1):
        if position > part.end and not whole_file:
            return
        position += len(line)
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 and not part.start else line


def _rows(part: Part, keys: Sequence[str]) -> Iterator[Record]:
    """Iterate over the rows of a Parquet file; the position is taken to grow evenly with their number."""
    parquet = optional("pyarrow.parquet", f"{part.path}: reading it")
    with parquet.ParquetFile(part.path, buffer_size=_BUFFER) as file:
        number, rows = 0, file.metadata.num_rows
        columns = keys if set(keys) <= set(file.schema_arrow.names) else None
        for batch in file.iter_batches(batch_size=128, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield Record(part, number, part.end * number // rows, row)


def _parse(content: bytes) -> dict[str, object]:
    try:
        record = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise InputError(f"not a JSON record but a {type(record).__name__}")
    return record


def _text(record: Mapping[str, object], key: str, lists: bool) -> str | list[str]:
    if key not in record:
        raise InputError(f'no key "{key}" (the record has: {", ".join(record) or "none"})')
    value = record[key]
    if lists and isinstance(value, list):
        return [_checked(text, key) for text in value]
    return _checked(value, key)


def _checked(value: object, key: str) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            raise InputError(f'key "{key}" holds no text but {json.dumps(text, default=str)[:40]}')
        text.encode()
    except UnicodeDecodeError as error:
        raise InputError(f'key "{key}" holds no UTF-8 ({error})') from None
    except UnicodeEncodeError as error:
        raise InputError(f'key "{key}" holds half a surrogate pair at character {error.start}') from None
    return text
