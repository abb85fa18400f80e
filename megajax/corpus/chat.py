r"""Conversations as token ids: context that is given and answers that are learnt, the same in training and in prompts.

A tokenizer with a chat template (Jinja, as Hugging Face keeps it) writes conversations by that template, in which the
names of special tokens stand for these tokens. With any other tokenizer, roles are written as text:

    <|system|>\nBe brief.\n<|user|>\nHow much is 6 x 7?\n<|assistant|>\n42<end of document>

The ids of a prompt are those that precede the answer in training, earlier answers of the assistant included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, TypeGuard

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from megajax.config.base import InputError
from megajax.data.tokenizers import Tokenizer
from megajax.data.tokenizers.tokenizer import ROLES as TOKEN_ROLES

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]
"""Message of a conversation, with a role and a content, which is text."""
_PROBE = "megajax"
_ROLES_AS_TEXT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


class Chat:
    """Write conversations by a tokenizer's chat template, or with roles as text.

    Args:
        tokenizer: tokenizer with its special tokens, its beginning of sequence and its `chat_template`, if it has one.

    Raises:
        InputError: the chat template is not a valid template.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._template = _compiled(tokenizer.chat_template) if tokenizer.chat_template else None
        self.not_learnt = 0

    def turns(self, conversations: Sequence[Sequence[Message]]) -> list[list[list[int]]]:
        """Return the ids of each conversation as turns: context and answer alternate, each answer with the token that
        ends it.

        Messages after the last answer are dropped. A template may write an earlier answer differently than it was given
        (without its reasoning, say): then that answer counts as context, and `not_learnt` counts it.

        Raises:
            InputError: a message has no role or text, there is no answer, or the template cannot write it.
        """
        if self._template is None:
            texts = [render(messages) for messages in conversations]
            encoded = iter(self._tokenizer.encode_batch([text for some in texts for text in some]))
            return [self._ended(list(islice(encoded, len(some)))) for some in texts]
        return [self._templated(messages) for messages in conversations]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that precede the assistant's next answer.

        Raises:
            InputError: a message has no role or text, or the template cannot write it.
        """
        if self._template is None:
            turns = self._ended(self._tokenizer.encode_batch(render([*messages, _answer("")])))
            return [i for turn in turns[:-1] for i in turn]
        check_messages(messages)
        text = self.text(messages, opened=True)
        return [i for turn in self._cut(text, messages) for i in turn]

    def text(self, messages: Sequence[Message], opened: bool = False) -> str:
        """Return a conversation as the template writes it, with `opened` up to the beginning of an answer.

        Raises:
            InputError: there is no template, or it cannot write this conversation.
        """
        if self._template is None:
            raise InputError("the tokenizer has no chat template: set tokenizer.chat_template")
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=opened, **self._names)
        except Exception as error:  # a template is a program, and may raise anything
            raise InputError(f"the chat template cannot write this conversation: {error}") from None

    @cached_property
    def end_id(self) -> int | None:
        """Return the special token that ends an answer, or None if the template has none."""
        if self._template is None:
            return self._tokenizer.eod_id
        text = self.text([{"role": "user", "content": _PROBE}, _answer(_PROBE)])
        ids = self._tokenizer.encode_marked(text[text.rindex(_PROBE) + len(_PROBE) :])
        return next((i for i in ids if i in self._tokenizer.special.values()), None)

    @cached_property
    def _names(self) -> dict[str, Any]:
        names = {i: name for name, i in self._tokenizer.special.items()}
        ids = {role: self._tokenizer.id_for(role) for role in TOKEN_ROLES}
        tokens = {f"{role}_token": names[i] for role, i in ids.items() if i in names}
        return {**tokens, "tools": None, "documents": None}

    def _ended(self, turns: list[list[int]]) -> list[list[int]]:
        """Add the beginning of sequence before all turns, and the end of an answer after each answer."""
        turns[0][:0] = self._tokenizer.prefix
        for answer in turns[1::2]:
            answer.append(self._tokenizer.eod_id)
        return turns

    def _templated(self, messages: Sequence[Message]) -> list[list[int]]:
        check_messages(messages)
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None:
            raise InputError("no message of the assistant to learn from")
        messages = messages[: last + 1]
        whole = self.text(messages)
        if not whole.startswith(self.text(messages[:last], opened=True)):
            raise InputError("the chat template writes the last answer otherwise than behind its own prompt")
        turns = self._cut(whole, messages)[:-1]
        self.not_learnt += sum(message["role"] == "assistant" for message in messages) - len(turns) // 2
        return turns

    def _cut(self, whole: str, messages: Sequence[Message]) -> list[list[int]]:
        """Return the ids of a text in pieces: up to an answer, up to its end, and so on, and the rest.

        The ids before each cut are those of the text before the cut alone, so a prompt that ends there has the same
        ids.
        """
        cuts = [0]
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                begin, end = self.text(messages[:i], opened=True), self.text(messages[: i + 1])
                if whole.startswith(end) and end.startswith(begin):
                    cuts += [len(begin), len(begin) + self._answer_length(end[len(begin) :])]
        turns: list[list[int]] = []
        ids: list[int] = []
        for start, stop in pairwise([*cuts, len(whole)]):
            so_far = self._tokenizer.encode_marked(whole[:stop])
            same = so_far[: len(ids)] == ids
            turns.append(so_far[len(ids) :] if same else self._tokenizer.encode_marked(whole[start:stop]))
            ids += turns[-1]
        return turns

    def _answer_length(self, text: str) -> int:
        """Return the length of an answer up to the special token that ends it; spaces after that do not count."""
        names = "|".join(map(re.escape, self._tokenizer.special))
        ending = re.search(rf"({names})\s*$", text) if names else None
        return ending.end(1) if ending else len(text)


def roles_as_text(tokenizer: Tokenizer) -> str:
    """Return a chat template that writes roles as text, for readers of an exported tokenizer that has no template."""
    return ("{{ bos_token }}" if tokenizer.prefix else "") + _ROLES_AS_TEXT


def render(messages: Sequence[Message]) -> list[str]:
    """Write a conversation as texts, context and answer in turn; messages after the last answer are dropped.

    Raises:
        InputError: a message has no known role or no text, or there is no answer.
    """
    check_messages(messages, ROLES)
    texts: list[str] = []
    given = ""
    for message in messages:
        if message["role"] == "assistant":
            texts += [f"{given}<|assistant|>\n", message["content"]]
            given = ""
        else:
            given += f"<|{message['role']}|>\n{message['content']}\n"
    if not texts:
        raise InputError("no message of the assistant to learn from")
    return texts


def check_messages(messages: Sequence[Message], roles: Sequence[str] = ()) -> None:
    """Refuse anything but a list of messages.

    Raises:
        InputError: a message has no role (one of `roles`, if there are any) or no text.
    """
    for number, message in enumerate(messages, 1):
        role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
        if not _is_text(content) or not (role in roles if roles else _is_text(role)):
            which = f"one of {', '.join(roles)}" if roles else "a name"
            raise InputError(f"message {number} needs a text under content, and under role {which}")


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _is_text(content: object) -> TypeGuard[str]:
    """Tell whether a value is a string without half a surrogate pair."""
    try:
        return isinstance(content, str) and content.encode() is not None
    except UnicodeEncodeError:
        return False


class _Generation(ext.Extension):
    """Accept `{% generation %}`, which marks answers for transformers, and leave the text as it is."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(template: str) -> jinja2.Template:
    """Compile a template that can neither change its arguments nor reach anything else, as transformers does."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template is no Jinja template: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
