"""Chat records to token files: context and the assistant's answers, as alternating sequences.

A record is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}`, and
`chat.py` turns it into ids. Every document of the token file is a conversation, and its sequences are context and
answer in turn (an answer includes the token that ends it, after which another turn may follow).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from megajax.config.base import InputError
from megajax.corpus.chat import Chat, Message, render
from megajax.corpus.corpus import warn_of_losses
from megajax.corpus.readers import Record, read_part, whole
from megajax.data.indexed import IndexedWriter, token_dtype
from megajax.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)

_KEY = "messages"
_BATCH = 256


def write_conversations(paths: Sequence[str | Path], prefix: str | Path, tokenizer: Tokenizer) -> int:
    """Tokenize the conversations of some files into `PREFIX.bin` and `.idx`, and return their number.

    Raises:
        InputError: a file cannot be read, a record is not a conversation with an answer, or there is no conversation.
    """
    count, chat = 0, Chat(tokenizer)
    warn_of_losses(tokenizer, (str(text) for record in _records(paths) for text in _contents(record)))
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for turns in _turns(paths, chat):
            writer.add_document([token for turn in turns for token in turn], [*map(len, turns)])
            count += 1
        if not count:
            raise InputError(f"{', '.join(map(str, paths))}: no conversations")
    if chat.not_learnt:
        log.warning(
            "%s: %d answers are not learnt, since the chat template changes them once another turn follows",
            prefix, chat.not_learnt,
        )  # fmt: skip
    return count


def read_conversations(paths: Iterable[str | Path]) -> Iterator[list[str]]:
    """Iterate over the conversations of some files as text, on which a tokenizer can be trained.

    Raises:
        InputError: a file cannot be read, or a record is not a conversation with an answer.
    """
    for record in _records(paths):
        try:
            yield render(_messages(record))
        except InputError as error:
            raise InputError(f"{record.where}: {error}") from None


def _turns(paths: Sequence[str | Path], chat: Chat) -> Iterator[list[list[int]]]:
    records = _records(paths)
    while group := list(islice(records, _BATCH)):
        try:
            yield from chat.turns([_messages(record) for record in group])
        except InputError:  # the error does not name the record
            for record in group:
                try:
                    chat.turns([_messages(record)])
                except InputError as error:
                    raise InputError(f"{record.where}: {error}") from None
            raise


def _contents(record: Record) -> Iterator[object]:
    """Iterate over the contents of a record's messages, if it is a conversation."""
    with suppress(InputError):
        yield from (message.get("content") for message in _messages(record) if isinstance(message, dict))


def _records(paths: Iterable[str | Path]) -> Iterator[Record]:
    for path in paths:
        yield from read_part(whole(path), [_KEY])


def _messages(record: Record) -> list[Message]:
    try:
        values = json.loads(record.content) if isinstance(record.content, bytes) else record.content
        messages = values[_KEY]
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON ({error})") from None
    except (KeyError, TypeError):
        messages = None
    if not isinstance(messages, list):
        raise InputError(f'no list of messages: instruction data has records {{"{_KEY}": [...]}}')
    return messages
