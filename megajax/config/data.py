"""Configuration of what the model reads: tokenizer, sources, splits, and how documents are cut into samples."""

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
"""Names of files, one or a list of them, relative to the working directory as the user wrote them."""
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
"""Type of tokenizer -> the keys of the files that it needs."""
SENTENCEPIECE = Needs("tokenizer.type", ("sentencepiece",))
WORDPIECE = Needs("tokenizer.type", ("bert_wordpiece",))
TIKTOKEN = Needs("tokenizer.type", ("tiktoken",))
TRAIN_PATH = Needs("data.train_path")
MASKED = Needs("data.kind", ("bert", "t5"))
TEXT = Needs("data.kind", ("gpt",))
FIM = Needs("data.fim_rate")


@component
class TokenizerConfig:
    """Say which tokenizer turns text into ids, and which files it is read from."""

    type: Annotated[TokenizerType, Elsewhere("tokenizer_type")] = "null"
    """Type of the tokenizer: sentencepiece, huggingface and tiktoken need model, gpt2_bpe needs vocab and merges,
    bert_wordpiece needs vocab, and null needs vocab_size."""
    model: Annotated[PathName | None, Elsewhere("tokenizer_model")] = None
    """File of the tokenizer: SentencePiece .model, Hugging Face tokenizer.json, or tiktoken vocabulary (.tiktoken, or
    .json as Megatron's)."""
    vocab: Annotated[PathName | None, Elsewhere("vocab_file")] = None
    """File of the vocabulary: vocab.json of a GPT-2 BPE, or vocab.txt of a BERT WordPiece."""
    merges: Annotated[PathName | None, Elsewhere("merge_file merges_file")] = None
    """File of the merges: merges.txt of a GPT-2 BPE."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. null: number of plain ids, after which comes the end-of-document id. sentencepiece,
    bert_wordpiece: number of pieces to train on data.text. tiktoken .json: number of ids to keep, special ones included
    (unset = 131,072)."""
    lower_case: Annotated[bool, WORDPIECE] = True
    """bert_wordpiece: read texts in lower case and without accents (uncased BERT)."""
    append_ends: Annotated[bool, WORDPIECE] = True
    """bert_wordpiece: append [BOS] and [EOS] to the vocabulary, as Megatron-LM does, and end documents with [EOS]; off
    = keep the vocabulary of the file, and end documents with [SEP]."""
    special_ids: Annotated[bool, SENTENCEPIECE] = False
    """sentencepiece: append <CLS> <SEP> <EOD> <MASK> and what else masked models need to the vocabulary, and end
    documents with <EOD>."""
    extra_ids: Annotated[NonNegativeInt, Elsewhere("vocab_extra_ids")] = 0
    """Number of T5 sentinels <extra_id_0>, <extra_id_1>, ...; those that the vocabulary lacks are appended to it."""
    extra_ids_descend: Annotated[bool, SENTENCEPIECE] = False
    """sentencepiece: give the last sentinel the lowest id, as in the vocabulary of Google's T5."""
    bos: bool | None = None
    """Begin documents, prompts and evaluated texts with the beginning-of-sequence id; unset = as the tokenizer.json, or
    the tokenizer_config.json beside the tokenizer, has it. Texts of masked models never begin with it."""
    chat_template: PathName | None = None
    """File with the template of conversations (Jinja, as for Hugging Face); unset = chat_template.jinja or
    tokenizer_config.json beside the tokenizer, or else <|user|> and <|assistant|> on lines of their own."""
    tiktoken_pattern: Annotated[Literal["v1", "v2", "llama3"] | None, TIKTOKEN] = None
    """Pattern by which a text is cut before merging; unset = v2 for a .json vocabulary (Megatron), llama3 for a
    .tiktoken one."""
    tiktoken_special_ids: Annotated[PositiveInt | None, TIKTOKEN, Elsewhere("tiktoken_num_special_tokens")] = None
    """Number of special ids, which are the first ones of a .json vocabulary (unset = 1000) and the last ones of a
    .tiktoken one (unset = 256)."""

    def __post_init__(self) -> None:
        """Refuse switches of other types, and a type whose files are not named."""
        refuse_ignored("tokenizer", self)
        trains_its_own = self.type in ("sentencepiece", "bert_wordpiece") and self.vocab_size is not None
        for key in () if trains_its_own else _FILES[self.type]:
            if getattr(self, key) is None:
                raise InputError(f"tokenizer.type {self.type} needs a file: set tokenizer.{key}")


@component
class DataConfig:
    """Say which text is trained on, and how samples are made of it."""

    kind: Annotated[Literal["auto", "gpt", "bert", "t5", "instruction"], Elsewhere("sft=instruction")] = "auto"
    """Kind of samples: text to continue (gpt), masked text (bert), text with missing spans (t5), conversations
    (instruction); auto = the name of model.family."""
    path: Annotated[Paths, Elsewhere("data_path")] = ()
    """Token files to train and evaluate on: `prefix`, `[prefix, ...]` or `[weight, prefix, weight, prefix, ...]`
    (Megatron's --data-path)."""
    train_path: Annotated[Paths, Elsewhere("train_data_path")] = ()
    """Token files for training only, written as in path; it goes with valid_path and test_path, and replaces path and
    split."""
    valid_path: Annotated[Paths, TRAIN_PATH, Elsewhere("valid_data_path")] = ()
    """Token files for validation only, written as in path."""
    test_path: Annotated[Paths, TRAIN_PATH, Elsewhere("test_data_path")] = ()
    """Token files for the test set only, written as in path."""
    text: Paths = ()
    """JSON Lines files that are tokenized first, into OUTPUT_DIR/data; they replace path."""
    text_key: Annotated[str, Elsewhere("json_keys")] = "text"
    """Key of the JSON Lines records that holds the document; instruction data is read from the key `messages`."""
    mock: Annotated[bool, Elsewhere("mock_data=true")] = False
    """Train on made-up documents of random lengths instead of any source."""
    split: str = "969,30,1"
    """Relative sizes of the training, validation and test part of each source."""
    seq_length: Annotated[PositiveInt, Elsewhere("encoder_seq_length")] = 1024
    """Number of tokens of a sample, S."""
    decoder_seq_length: Annotated[PositiveInt, T5, Elsewhere("decoder_sequence_length")] = 128
    """t5: number of tokens of a sample of the decoder, T."""
    mask_prob: Annotated[BelowOne, Field(gt=0.0), MASKED, Elsewhere("mlm_probability")] = 0.15
    """bert, t5: share of the tokens that the model has to predict."""
    short_seq_prob: Annotated[Fraction, MASKED] = 0.1
    """bert, t5: share of the samples that are cut to a random length."""
    fim_rate: Annotated[Fraction, Elsewhere("fim_data")] = 0.0
    """gpt: share of the documents that are turned into prefix, suffix, middle (fill-in-the-middle)."""
    fim_spm_rate: Annotated[Fraction, FIM] = 0.5
    """gpt: share of these documents that give the suffix first."""
    fim_tokens: Annotated[tuple[str, ...], FIM] = ()
    """gpt: names of the tokens before prefix, middle and suffix, in this order; unset = <fim_prefix>, <fim_middle>,
    <fim_suffix>, or the same between bars (<|fim_prefix|>)."""
    mask_eod_loss: Annotated[bool, TEXT, Elsewhere("eod_mask_loss=true")] = False
    """Count no loss where the input token is the end of a document."""
    reset_positions: Annotated[
        bool, TEXT, Needs("model.positions", ("learned", "rope")), Elsewhere("reset_position_ids=true")
    ] = False
    """Restart positions at 0 after every end of a document."""
    reset_attention: Annotated[bool, TEXT, Elsewhere("reset_attention_mask=true")] = False
    """Keep a document from attending to the documents before it in the same sample."""
    cache_dir: Annotated[PathName | None, Elsewhere("data_cache_path")] = None
    """Directory in which the order of samples is cached; unset = beside each source."""
    prefetch: Annotated[NonNegativeInt, Elsewhere("num_workers")] = 4
    """Number of batches that are read ahead; 0 = read in the training thread."""

    def __post_init__(self) -> None:
        """Refuse sources that exclude one another, and values that other keys leave without a meaning."""
        refuse_ignored("data", self)
        given = [f"data.{key}" for key in ("path", "train_path", "text", "mock") if getattr(self, key)]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} are both set: keep one")

    def kind_for(self, family: str) -> str:
        """Return the kind of samples, which is the model's family where the configuration says auto."""
        return family if self.kind == "auto" else self.kind
