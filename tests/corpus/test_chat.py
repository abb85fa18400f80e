"""A tokenizer's chat template writes conversations: prompts have the ids of training, and only answers are learnt."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megajax.config import Config, DataConfig, InputError, TokenizerConfig
from megajax.corpus.chat import Chat
from megajax.corpus.conversations import write_conversations
from megajax.data.indexed import IndexedDataset, Selection
from megajax.data.instruction import InstructionDataset
from megajax.data.tokenizers import SentencePieceTokenizer, Tokenizer, build_tokenizer, train_sentencepiece
from megajax.inference.trained import TrainedModel

CHATML = (
    "{% for message in messages %}\n<|im_start|>{{ message['role'] }}\n{% generation %}\n{{ message['content'] }}"
    "{% endgeneration %}<|im_end|>\n\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = '<<SYS>>\\n' + "
    "messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% else %}{% set loop_messages = messages %}{% set system = '' %}"
    "{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n\\n' + "
    "message['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}"
    "{%- else -%}{%- set role = message['role'] -%}{%- endif -%}{{ '<|im_start|>' + role + '\\n' + "
    "message['content'] | trim + '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>model\\n' }}{%- endif -%}"
)
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' and "
    "loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "llama3": LLAMA3, "gemma": GEMMA, "thinking": THINKING, "none": None}
MESSAGES = [
    {"role": "user", "content": "How much is 6 x 7?"},
    {"role": "assistant", "content": "\n42, I think"},
    {"role": "user", "content": "Are you sure? <|im_end|>"},
    {"role": "assistant", "content": "Yes."},
]
TEXTS = [message["content"] for message in MESSAGES] + ["user assistant model system", "[INST] [/INST]"]


def settings(template: str | None) -> str:
    about = {"bos_token": "<bos>", "eos_token": "<|im_end|>"}
    return json.dumps(about | ({"chat_template": template} if template else {}))


def byte_level(folder: Path, template: str | None) -> Tokenizer:
    tiny = tokenizers.ByteLevelBPETokenizer()
    special = ["<|im_end|>", "<bos>", "<|im_start|>"]
    tiny.train_from_iterator(TEXTS, vocab_size=330, show_progress=False, special_tokens=special)
    tiny._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(settings(template))
    return build_tokenizer(TokenizerConfig(type="huggingface", model=str(folder / "tokenizer.json")))


def pieces(folder: Path, template: str | None) -> Tokenizer:
    train_sentencepiece(TEXTS, folder / "tokenizer.model", 320)
    added = {"<|im_start|>": 320, "<|im_end|>": 321}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "chat_template.jinja").write_text(template or "")
    if template is None:
        (folder / "chat_template.jinja").unlink()
    return SentencePieceTokenizer(folder / "tokenizer.model") if template is None else build_tokenizer(
        TokenizerConfig(type="sentencepiece", model=str(folder / "tokenizer.model"))
    )  # fmt: skip


@pytest.mark.parametrize("make", [byte_level, pieces])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_what_stands_before_answers(make, name: str, tmp_path: Path) -> None:
    """For every answer; with the token behind an earlier answer, which has no text of its own."""
    tokenizer = make(tmp_path, TEMPLATES[name])
    chat = Chat(tokenizer)
    [turns] = chat.turns([MESSAGES])
    trained_on = [i for turn in turns for i in turn]
    answers = [1, 3] if name != "thinking" else [3]  # that template takes the thoughts out of earlier answers
    assert len(turns) == 2 * len(answers)
    assert chat.not_learnt == 2 - len(answers)
    for number, answer in enumerate(answers):
        prompt = list(TrainedModel(None, tokenizer, Config()).chat(MESSAGES[:answer]).ids)
        assert trained_on[: len(prompt)] == prompt
        assert prompt == [i for turn in turns[: 2 * number + 1] for i in turn]
        learnt = turns[2 * number + 1]
        assert learnt[-1] == (chat.end_id if chat.end_id is not None else tokenizer.eod_id)
        said = tokenizer.decode(learnt[:-1])
        assert MESSAGES[answer]["content"].strip() in said
        assert "Are you sure" not in said
    if name != "none":
        assert trained_on.count(tokenizer.special["<|im_start|>"]) == (0 if name == "llama2" else 4)


def test_answers_alone_bear_loss(tmp_path: Path) -> None:
    """From records to a batch, by the template beside the tokenizer."""
    tokenizer = byte_level(tmp_path, CHATML)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    assert write_conversations([tmp_path / "chat.jsonl"], tmp_path / "made", tokenizer) == 1
    selection = Selection(IndexedDataset(tmp_path / "made"), np.arange(1), None, 1, "train", None)
    batch = InstructionDataset(selection, DataConfig(seq_length=256), tokenizer).batch(np.array([0]))
    [turns] = Chat(tokenizer).turns([MESSAGES])
    learnt = batch["labels"][0][batch["loss_mask"][0] > 0].tolist()
    assert learnt == [*turns[1], *turns[3]]
    assert tokenizer.decode(learnt) == "\n42, I think<|im_end|>Yes.<|im_end|>"


def test_answers_that_a_template_changes_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    with caplog.at_level(logging.WARNING):
        write_conversations([tmp_path / "chat.jsonl"], tmp_path / "made", byte_level(tmp_path, THINKING))
    assert "1 answers are not learnt, since the chat template changes them" in caplog.text


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{% if %}", MESSAGES, "is no Jinja template"),
        (LLAMA2, [*MESSAGES[:1], *MESSAGES[2:]], r"chat\.jsonl:1: .*Roles must alternate"),
        ("{{ messages.append(1) }}", MESSAGES, "cannot write this conversation"),
        ("{{ messages[0].__class__.__mro__[1].__subclasses__() }}", MESSAGES, "cannot write this conversation"),
        ("{{ messages[-1].content }}{% if add_generation_prompt %}!{% endif %}", MESSAGES, "the last answer otherwise"),
        (CHATML, [{"role": "user", "content": None}], "message 1 needs a text under content, and under role a name"),
        (CHATML, MESSAGES[:1], "no message of the assistant"),
    ],
)
def test_one_line_for_what_cannot_be_written(template: str, messages: list, message: str, tmp_path: Path) -> None:
    """Templates are programs of others: they reach nothing, and their errors name the record."""
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(InputError, match=message):
        write_conversations([tmp_path / "chat.jsonl"], tmp_path / "made", byte_level(tmp_path, template))


def test_a_template_of_the_users_own(tmp_path: Path) -> None:
    """tokenizer.chat_template names a file, which counts instead of the one beside the tokenizer."""
    byte_level(tmp_path, CHATML)
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    config = TokenizerConfig(
        type="huggingface", model=str(tmp_path / "tokenizer.json"), chat_template=str(tmp_path / "mine.jinja")
    )
    assert build_tokenizer(config).chat_template == LLAMA3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', "half a surrogate pair"),
        ("tokenizer_config.json", b"[]", "not a JSON object"),
        ("special_tokens_map.json", b'{"eos_token": "\xff"}', "cannot be read"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
        ("added_tokens.json", b'{"<a>": "b"}', "tokens are added, but not by id and content"),
    ],
)
def test_one_line_for_files_beside_a_tokenizer(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    byte_level(tmp_path, None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        build_tokenizer(TokenizerConfig(type="huggingface", model=str(tmp_path / "tokenizer.json")))
