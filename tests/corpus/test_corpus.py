import gzip
import json
from pathlib import Path

import pytest

from megajax import preprocess as command
from megajax.config import InputError, TokenizerConfig
from megajax.corpus.corpus import Report, preprocess
from megajax.corpus.readers import read_documents
from megajax.data.indexed import IndexedDataset
from megajax.data.sources import document_range
from megajax.data.tokenizers import build_tokenizer, train_sentencepiece

NULL = TokenizerConfig(type="null", vocab_size=100)
EOD = 100


def jsonl(path: Path, *texts: str, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def tokens_of(prefix: str | Path) -> list[list[int]]:
    indexed = IndexedDataset(prefix)
    return [indexed[i].tolist() for i in range(len(indexed))]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> TokenizerConfig:
    path = tmp_path_factory.mktemp("tokenizer") / "words.model"
    train_sentencepiece(["some words to learn pieces from, and more words"], path, vocab_size=280)
    return TokenizerConfig(type="sentencepiece", model=str(path))


def test_documents_end_with_one_eod(tmp_path: Path):
    """An empty first document; no end is made out of nothing."""
    report = preprocess([jsonl(tmp_path / "a.jsonl", "", "1 2", "3")], tmp_path / "out", NULL)

    assert report == Report(f"{tmp_path}/out_text_document", documents=3, empty=1, skipped=0, tokens=5, unknown=0)
    assert tokens_of(report.prefix) == [[1, 2, EOD], [3, EOD]]
    assert IndexedDataset(report.prefix).document_index.tolist() == [0, 0, 1, 2]
    assert str(report).endswith("out_text_document: 3 documents (1 empty), 5 tokens (0 unknown), 0 lines skipped")


def test_eod_can_be_left_out(tmp_path: Path):
    report = preprocess([jsonl(tmp_path / "a.jsonl", "1 2", "3")], tmp_path / "out", NULL, append_eod=False)

    assert tokens_of(report.prefix) == [[1, 2], [3]]


def test_no_second_eod_from_the_tokenizer(tmp_path: Path, words: TokenizerConfig):
    """3 documents, 3 ends, no BOS."""
    report = preprocess([jsonl(tmp_path / "a.jsonl", "some", "words </s>", "<s> more")], tmp_path / "out", words)
    tokenizer = build_tokenizer(words)
    documents = tokens_of(report.prefix)

    assert [document.count(tokenizer.eod_id) for document in documents] == [1, 1, 1]
    assert all(document[-1] == tokenizer.eod_id and tokenizer.bos_id not in document for document in documents)


def test_literal_control_string_stays_text(tmp_path: Path, words: TokenizerConfig):
    report = preprocess([jsonl(tmp_path / "a.jsonl", "a<|endoftext|></s>b")], tmp_path / "out", words)
    [document] = tokens_of(report.prefix)
    tokenizer = build_tokenizer(words)

    assert document.count(tokenizer.eod_id) == 1
    assert tokenizer.decode(document[:-1]) == "a<|endoftext|></s>b"


BAD_LINES = [
    ('{"content": "2"}', r'no key "text" \(the record has: content\)'),
    ('{"text": null}', 'key "text" holds no text but null'),
    ("not JSON", "not JSON"),
    ('["1"]', "not a JSON record but a list"),
    ('{"text": "\\ud800"}', "half a surrogate pair at character 0"),
    ('{"text": "one"}', "reads integers between spaces"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line_is_named_and_nothing_is_written(tmp_path: Path, line: str, message: str):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "1"}}\n\n{line}\n')

    with pytest.raises(InputError, match=rf"a\.jsonl:3: .*{message}.*; mend it or skip bad lines"):
        preprocess([path], tmp_path / "out", NULL)
    assert list(tmp_path.iterdir()) == [path]


def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n{"content": "2"}\n{"text": null}\nnot JSON\n{"text": "5"}\n')
    report = preprocess([path], tmp_path / "out", NULL, on_bad_line="skip")

    assert (report.documents, report.skipped) == (2, 3)
    assert tokens_of(report.prefix) == [[1, EOD], [5, EOD]]


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:1: not JSON .*invalid start byte"):
        list(read_documents([tmp_path / "a.jsonl"]))


def test_key_is_the_one_asked_for(tmp_path: Path):
    (tmp_path / "both.jsonl").write_text('{"text": "1", "content": "2 3"}\n')
    preprocess([tmp_path / "both.jsonl"], tmp_path / "both", NULL, "content")
    preprocess([jsonl(tmp_path / "renamed.jsonl", "2 3")], tmp_path / "renamed", NULL)

    for suffix in ("bin", "idx"):
        both, renamed = tmp_path / f"both_content_document.{suffix}", tmp_path / f"renamed_text_document.{suffix}"
        assert both.read_bytes() == renamed.read_bytes()


def test_only_lf_ends_a_line(tmp_path: Path, words: TokenizerConfig):
    """U+2028 inside a string, CRLF, a byte-order mark, no final newline."""
    first, second = '{"text": "a\u2028b\u0085c"}', '{"text": "words"}'
    variants = {
        "plain": f"{first}\n{second}\n",
        "crlf": f"{first}\r\n{second}\r\n",
        "bom": f"\ufeff{first}\n{second}\n",
        "unfinished": f"{first}\n{second}",
    }
    written = []
    for name, content in variants.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(content.encode())
        assert list(read_documents([path])) == ["a\u2028b\u0085c", "words"]
        report = preprocess([path], tmp_path / name, words)
        assert report.documents == 2
        written.append(Path(f"{report.prefix}.bin").read_bytes())

    assert len(set(written)) == 1
    tokenizer = build_tokenizer(words)
    assert tokenizer.decode(tokens_of(report.prefix)[0][:-1]) == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("content", "documents"),
    [("", 0), ("\n \n\r\n", 0), ('{"text": "1"}\n', 1), ('{"text": "1"}\n\n{"text": "2"}', 2)],
)
def test_counts(tmp_path: Path, content: str, documents: int):
    path = tmp_path / "a.jsonl"
    path.write_text(content)

    assert len(list(read_documents([path]))) == documents
    if documents:
        assert preprocess([path], tmp_path / "out", NULL).documents == documents
    else:
        with pytest.raises(InputError, match=r"a\.jsonl: no documents with text \(0 empty, 0 lines skipped\)"):
            preprocess([path], tmp_path / "out", NULL)
        assert list(tmp_path.iterdir()) == [path]


def test_gzip_and_several_inputs(tmp_path: Path):
    plain = jsonl(tmp_path / "a.jsonl", "1", "2")
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl(tmp_path / "b.jsonl", "3", "4").read_bytes()))

    assert list(read_documents([plain, packed, plain])) == ["1", "2", "3", "4", "1", "2"]


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b'{"text": "1"}\n' * 99)[:-20]], ids=["not", "torn"])
def test_unreadable_files_are_named(tmp_path: Path, content: bytes):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz: cannot be read"):
        list(read_documents([tmp_path / "a.jsonl.gz"]))
    with pytest.raises(InputError, match=r"nowhere\.jsonl: cannot be read .*No such file"):
        list(read_documents(["nowhere.jsonl"]))


def test_bundled_text_leaves_documents_for_validation():
    documents = list(read_documents([Path(__file__).parents[2] / "configs" / "data" / "shakespeare.jsonl"]))

    assert len(documents) == 132
    assert all(3_800 < len(text) < 14_100 for text in documents)
    assert len(document_range((0.95, 1.0), len(documents))) == 7


def test_workers_keep_the_order(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", *(" ".join([str(i % 100)] * (i % 5)) for i in range(700)))
    alone = preprocess([path], tmp_path / "alone", NULL)
    together = preprocess([path], tmp_path / "together", NULL, workers=2)

    assert (together.documents, together.empty) == (alone.documents, alone.empty) == (700, 140)
    for suffix in ("bin", "idx"):
        assert Path(f"{together.prefix}.{suffix}").read_bytes() == Path(f"{alone.prefix}.{suffix}").read_bytes()


def test_unknown_text_is_counted_and_warned_about(tmp_path: Path, caplog):
    words = {"<unk>": 0, "</s>": 1, "hello": 2}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}, "added_tokens": []})
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
    tokenizer = TokenizerConfig(type="huggingface", model=str(tmp_path / "tokenizer.json"))
    report = preprocess([jsonl(tmp_path / "a.jsonl", "hello", "\U0001f917")], tmp_path / "out", tokenizer)

    assert (report.tokens, report.unknown) == (4, 1)
    assert caplog.messages == [f"{report.prefix}: 1 of 4 tokens are unknown to the tokenizer: their text is lost"]


def test_command_line_trains_a_tokenizer_and_uses_it(tmp_path: Path, capsys):
    path, prefix = str(jsonl(tmp_path / "a.jsonl", "some words to learn from", "and more words")), str(tmp_path / "out")

    assert command.main(["--input", path, "--output-prefix", prefix, "--train-tokenizer", "--vocab-size", "280"]) == 0
    arguments = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", f"{prefix}.model"]
    assert command.main(["--input", path, "--output-prefix", prefix, *arguments]) == 0

    tokenizer = build_tokenizer(TokenizerConfig(type="sentencepiece", model=f"{prefix}.model"))
    documents = [tokenizer.decode(ids[:-1]) for ids in tokens_of(f"{prefix}_text_document")]
    assert documents == ["some words to learn from", "and more words"]
    trained, written = capsys.readouterr().out.splitlines()
    assert trained == f"{prefix}.model: a SentencePiece tokenizer of 280 pieces"
    assert written.startswith(f"{prefix}_text_document: 2 documents (0 empty), ")


def test_command_line_takes_several_keys(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"question": "1", "answer": "2"}\n')
    arguments = ["--input", f"{tmp_path}/a.jsonl", "--output-prefix", f"{tmp_path}/out", "--no-append-eod"]
    code = command.main(
        [*arguments, "--json-keys", "question", "answer", "--tokenizer-type", "null", "--vocab-size", "9"]
    )

    assert code == 0
    assert tokens_of(tmp_path / "out_question_document") == [[1]]
    assert tokens_of(tmp_path / "out_answer_document") == [[2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer-type", "null", "--vocab-size", "9"], "a.jsonl:1: not JSON"),
        (["--tokenizer-type", "null"], "--vocab-size is not set: --tokenizer-type null needs the number of its ids"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "--tokenizer-type gpt2_bpe needs a file: set --vocab-file"),
        (
            ["--tokenizer-type", "sentencepiece", "--tokenizer-model", "a/tokenizer.model"],
            "a/tokenizer.model: no such file (--tokenizer-model)",
        ),
        (
            ["--tokenizer-type", "tiktoken", "--tokenizer-model", "tokenizer.model"],
            "tokenizer.model: no such file (--tokenizer-model)",
        ),
        (
            ["--tokenizer-type", "null", "--vocab-size", "9", "--tiktoken-pattern", "v1"],
            "--tiktoken-pattern is for --tokenizer-type tiktoken, not 'null'",
        ),
        (
            ["--tokenizer-type", "null", "--vocab-size", "9", "--append-bos"],
            "--append-bos is true, but this null tokenizer has no beginning of sequence",
        ),
        (["--train-tokenizer"], "--train-tokenizer needs --vocab-size"),
        ([], "--tokenizer-type is not set; choose one of sentencepiece, gpt2_bpe, huggingface, bert_wordpiece"),
    ],
)
def test_command_line_refuses_in_one_line(tmp_path: Path, capsys, arguments: list[str], message: str):
    """Exit code 2."""
    (tmp_path / "a.jsonl").write_text("oops\n")
    code = command.main(["--input", f"{tmp_path}/a.jsonl", "--output-prefix", f"{tmp_path}/out", *arguments])
    [line] = capsys.readouterr().err.splitlines()

    assert code == 2
    assert message in line
