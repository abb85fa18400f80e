"""What the model reads: tokenizer, sources, splits and how documents are cut into samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from megajax.config.base import BelowOne, Elsewhere, Fraction, InputError, PathName, component
from megajax.config.model import T5
from megajax.config.needs import Needs, refuse_ignored


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _null_is_a_name(value: Any) -> Any:
    return "null" if value is None else value


Paths = Annotated[tuple[PathName, ...], BeforeValidator(_one_or_many)]
"""One file name or a list of them, as written by the user: relative to the working directory."""
TokenizerType = Annotated[
    Literal["sentencepiece", "gpt2_bpe", "huggingface", "bert_wordpiece", "tiktoken", "null"],
    BeforeValidator(_null_is_a_name),  # YAML reads an unquoted null as nothing
]
_FILES = {
    "sentencepiece": ("model",),
    "huggingface": ("model",),
    "tiktoken": ("model",),
    "gpt2_bpe": ("vocab", "merges"),
    "bert_wordpiece": ("vocab",),
    "null": (),
}
"""The keys of the files that a type of tokenizer needs."""
SENTENCEPIECE = Needs("tokenizer.type", ("sentencepiece",))
WORDPIECE = Needs("tokenizer.type", ("bert_wordpiece",))
TIKTOKEN = Needs("tokenizer.type", ("tiktoken",))
TRAIN_PATH = Needs("data.train_path")
MASKED = Needs("data.kind", ("bert", "t5"))
TEXT = Needs("data.kind", ("gpt",))
FIM = Needs("data.fim_rate")


@component
class TokenizerConfig:
    """Which tokenizer turns text into ids, and from which files."""

    type: Annotated[TokenizerType, Elsewhere("tokenizer_type")] = "null"
    """sentencepiece, huggingface and tiktoken (set model), gpt2_bpe (set vocab and merges), bert_wordpiece (set
    vocab), null (set vocab_size)."""
    model: Annotated[PathName | None, Elsewhere("tokenizer_model")] = None
    """SentencePiece .model, Hugging Face tokenizer.json, or tiktoken vocabulary (.tiktoken, or .json as Megatron's)."""
    vocab: Annotated[PathName | None, Elsewhere("vocab_file")] = None
    """vocab.json of a GPT-2 BPE, vocab.txt of a BERT WordPiece."""
    merges: Annotated[PathName | None, Elsewhere("merge_file merges_file")] = None
    """merges.txt of a GPT-2 BPE."""
    vocab_size: PositiveInt | None = None
    """null: number of plain ids (the end-of-document id comes after them). sentencepiece, bert_wordpiece: pieces to
    train on data.text. tiktoken .json: ids to keep, special ones included (unset = 131,072)."""
    lower_case: Annotated[bool, WORDPIECE] = True
    """bert_wordpiece: texts are read in lower case and without accents (uncased BERT)."""
    append_ends: Annotated[bool, WORDPIECE] = True
    """bert_wordpiece: append [BOS] and [EOS], which ends documents, as Megatron-LM does; else [SEP] ends them, and the
    vocabulary is that of the file."""
    special_ids: Annotated[bool, SENTENCEPIECE] = False
    """sentencepiece: append <CLS> <SEP> <EOD> <MASK> and what else masked models need; <EOD> ends documents."""
    extra_ids: Annotated[NonNegativeInt, Elsewhere("vocab_extra_ids")] = 0
    """T5 sentinels <extra_id_0>, <extra_id_1>, ...: those the vocabulary lacks are appended to it."""
    extra_ids_descend: Annotated[bool, SENTENCEPIECE] = False
    """sentencepiece: the last sentinel has the lowest id, as in the vocabulary of Google's T5."""
    bos: bool | None = None
    """Documents, prompts and evaluated texts begin with the beginning-of-sequence id; unset = as the tokenizer.json, or
    tokenizer_config.json beside the tokenizer, has it. Texts of masked models never do."""
    chat_template: PathName | None = None
    """File with the template of conversations (Jinja, as for Hugging Face); unset = chat_template.jinja or
    tokenizer_config.json beside the tokenizer, else <|user|> and <|assistant|> on lines of their own."""
    tiktoken_pattern: Annotated[Literal["v1", "v2", "llama3"] | None, TIKTOKEN] = None
    """Where a text is cut before merging; unset = v2 for a .json vocabulary (Megatron), llama3 for a .tiktoken one."""
    tiktoken_special_ids: Annotated[PositiveInt | None, TIKTOKEN, Elsewhere("tiktoken_num_special_tokens")] = None
    """Special ids: the first ones of a .json vocabulary (unset = 1000), the last ones of a .tiktoken one (256)."""

    def __post_init__(self) -> None:
        """Refuse switches of other types, and a type without its files."""
        refuse_ignored("tokenizer", self)
        trains_its_own = self.type in ("sentencepiece", "bert_wordpiece") and self.vocab_size is not None
        for key in () if trains_its_own else _FILES[self.type]:
            if getattr(self, key) is None:
                raise InputError(f"tokenizer.type {self.type} needs a file: set tokenizer.{key}")


@component
class DataConfig:
    """Sources of training text and how samples are made of them."""

    kind: Annotated[Literal["auto", "gpt", "bert", "t5", "instruction"], Elsewhere("sft=instruction")] = "auto"
    """What a sample is: text to continue, masked text, text with missing spans, conversations; auto = model.family."""
    path: Annotated[Paths, Elsewhere("data_path")] = ()
    """Token files: `prefix`, `[prefix, ...]` or `[weight, prefix, weight, prefix, ...]` (Megatron's --data-path)."""
    train_path: Annotated[Paths, Elsewhere("train_data_path")] = ()
    """The same, for training only (with valid_path and test_path, instead of path and split)."""
    valid_path: Annotated[Paths, TRAIN_PATH, Elsewhere("valid_data_path")] = ()
    """The same, for validation only."""
    test_path: Annotated[Paths, TRAIN_PATH, Elsewhere("test_data_path")] = ()
    """The same, for the test set only."""
    text: Paths = ()
    """jsonl files to tokenize first, into OUTPUT_DIR/data; replaces path."""
    text_key: Annotated[str, Elsewhere("json_keys")] = "text"
    """Key of the jsonl records that holds the document; instruction data is read from the key `messages`."""
    mock: Annotated[bool, Elsewhere("mock_data=true")] = False
    """Made-up documents of random lengths instead of any source."""
    split: str = "969,30,1"
    """Relative sizes of the train, validation and test part of each source."""
    seq_length: Annotated[PositiveInt, Elsewhere("encoder_seq_length")] = 1024
    """S, tokens per sample."""
    decoder_seq_length: Annotated[PositiveInt, T5, Elsewhere("decoder_sequence_length")] = 128
    """t5: T, tokens per sample of the decoder."""
    mask_prob: Annotated[BelowOne, Field(gt=0.0), MASKED, Elsewhere("mlm_probability")] = 0.15
    """bert, t5: share of the tokens to be predicted."""
    short_seq_prob: Annotated[Fraction, MASKED] = 0.1
    """bert, t5: share of the samples that are cut to a random length."""
    fim_rate: Annotated[Fraction, Elsewhere("fim_data")] = 0.0
    """gpt: share of the documents turned into prefix, suffix, middle (fill-in-the-middle)."""
    fim_spm_rate: Annotated[Fraction, FIM] = 0.5
    """gpt: share of those that give the suffix first."""
    fim_tokens: Annotated[tuple[str, ...], FIM] = ()
    """gpt: names of the tokens before prefix, middle and suffix, in this order; unset = <fim_prefix>, <fim_middle>,
    <fim_suffix>, or the same between bars (<|fim_prefix|>)."""
    mask_eod_loss: Annotated[bool, TEXT, Elsewhere("eod_mask_loss=true")] = False
    """No loss where the input token is the end of a document."""
    reset_positions: Annotated[
        bool, TEXT, Needs("model.positions", ("learned", "rope")), Elsewhere("reset_position_ids=true")
    ] = False
    """Positions restart at 0 after every end of document."""
    reset_attention: Annotated[bool, TEXT, Elsewhere("reset_attention_mask=true")] = False
    """A document does not attend to the ones before it in the same sample."""
    cache_dir: Annotated[PathName | None, Elsewhere("data_cache_path")] = None
    """Where the sample order is cached; unset = beside each source."""
    prefetch: Annotated[NonNegativeInt, Elsewhere("num_workers")] = 4
    """Batches read ahead; 0 = read in the training thread."""

    def __post_init__(self) -> None:
        """Refuse sources that exclude one another, and what other keys leave without meaning."""
        refuse_ignored("data", self)
        given = [f"data.{key}" for key in ("path", "train_path", "text", "mock") if getattr(self, key)]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} are both set: keep one")

    def kind_for(self, family: str) -> str:
        """Return what a sample is, after the default: that of the model's family."""
        return family if self.kind == "auto" else self.kind
