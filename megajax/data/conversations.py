r"""Chat records to token files: what was said to the assistant and what it answered, as sequences in turn.

A record is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}`. Roles
are written as text, so any tokenizer will do:

    <|system|>\nBe brief.\n<|user|>\nHow much is 6 x 7?\n<|assistant|>\n42<end of document>

Every document of the token file is a conversation, and its sequences are, in turn, text that is given (up to and with
`<|assistant|>\n`) and the answer to it (with the end-of-document id, after which another `<|user|>` may follow).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeGuard

from megajax.config.base import ConfigError
from megajax.data.indexed import IndexedWriter, token_dtype
from megajax.data.readers import Record, read_part, whole
from megajax.data.tokenizers import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
_KEY = "messages"
_BATCH = 256


def write_conversations(paths: Sequence[str | Path], prefix: str | Path, tokenizer: Tokenizer) -> int:
    """Tokenize the conversations of some files into `PREFIX.bin` and `.idx`; return how many there are.

    Raises:
        ConfigError: a file cannot be read, a record is no conversation with an answer, or there is none.
    """
    count = 0
    conversations = read_conversations(paths)
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        while group := list(islice(conversations, _BATCH)):
            encoded = iter(tokenizer.encode_batch([text for texts in group for text in texts]))
            for texts in group:
                turns = list(islice(encoded, len(texts)))
                for answer in turns[1::2]:
                    answer.append(tokenizer.eod_id)
                writer.add_document([token for turn in turns for token in turn], [*map(len, turns)])
            count += len(group)
        if not count:
            raise ConfigError(f"{', '.join(map(str, paths))}: no conversations")
    return count


def read_conversations(paths: Iterable[str | Path]) -> Iterator[list[str]]:
    """Iterate over the conversations of some files, as `render` writes them.

    Raises:
        ConfigError: a file cannot be read, or a record is no conversation with an answer.
    """
    for path in paths:
        for record in read_part(whole(path), [_KEY]):
            try:
                yield render(_messages(record))
            except ConfigError as error:
                raise ConfigError(f"{record.where}: {error}") from None


def _messages(record: Record) -> list[Mapping[str, str]]:
    try:
        values = json.loads(record.content) if isinstance(record.content, bytes) else record.content
        messages = values[_KEY]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error})") from None
    except (KeyError, TypeError):
        messages = None
    if not isinstance(messages, list):
        raise ConfigError(f'no list of messages: instruction data has records {{"{_KEY}": [...]}}')
    return messages


def _is_text(content: object) -> TypeGuard[str]:
    """Whether something is a string without half a surrogate pair."""
    try:
        return isinstance(content, str) and content.encode() is not None
    except UnicodeEncodeError:
        return False


def render(messages: Sequence[Mapping[str, str]]) -> list[str]:
    """Write a conversation as texts that are, in turn, given and to be learnt; what follows the last answer is dropped.

    Raises:
        ConfigError: a message has no known role or no text, or there is no answer.
    """
    texts: list[str] = []
    given = ""
    for number, message in enumerate(messages, 1):
        role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
        if role not in ROLES or not _is_text(content):
            raise ConfigError(f"message {number} needs a text under content, and under role one of {', '.join(ROLES)}")
        if role == "assistant":
            texts += [f"{given}<|assistant|>\n", content]
            given = ""
        else:
            given += f"<|{role}|>\n{content}\n"
    if not texts:
        raise ConfigError("no message of the assistant to learn from")
    return texts
