"""Model for lm-evaluation-harness: its tasks, prompts and metrics, with the model of a run on any mesh.

    python -m megajax.inference.tasks.harness --model megajax --model_args run=RUN_DIR --tasks arc_easy,hellaswag

is the harness's own command line with the model `megajax` added; `pip install lm-eval` first. From Python, give
`lm_eval.simple_evaluate` the model `registered()(RUN_DIR)`. Scored tokens and windows follow the contract of the
harness's `LM` class (0.4).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from megajax.config import InputError
from megajax.config.cli import entry_point
from megajax.corpus.chat import Chat
from megajax.inference.sample import Options, continue_prompts
from megajax.inference.sampling import Sampling
from megajax.inference.tasks.scoring import Scorer, Window
from megajax.inference.trained import Prompt, load_model

MAX_NEW_TOKENS = 256
"""Number of new tokens that the harness expects if a task names none."""


class HarnessModel:
    """Answer the three requests of the harness; the argument of each is a list of its `Instance`s."""

    def __init__(
        self,
        run: str,
        step: int | None = None,
        words: str = "",
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Load a run.

        Args:
            run: directory of the run.
            step: step of the checkpoint; None for the newest.
            words: layout and precision, between spaces: "parallel.tensor=2 train.precision=bf16".
            batch_size: rows that run together; "auto" = 8.
            max_batch_size: without effect, given by the harness.
            device: without effect; `words` place the model.
        """
        super().__init__()
        self.trained = load_model(run, step, words.split(), "lm-evaluation-harness", writes=("continuation",))
        self.batch_size = 8 if batch_size == "auto" else int(batch_size)
        self.chats = False
        self.scorer = Scorer(self.trained, self.batch_size)
        self.length = self.trained.config.model.max_positions
        tokenizer = self.trained.tokenizer
        self.beginning = tokenizer.eod_id if tokenizer.bos_id is None else tokenizer.bos_id

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation of a context, and whether it is the greedy one."""
        windows = [self._pair(*request.args) for request in requests]
        results = [(-scores.loss, bool(scores.greedy.all())) for scores in self.scorer(windows)]
        return self._remembered("loglikelihood", requests, results)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text."""
        texts = [list(self._rolling(request.args[0])) for request in requests]
        scores = iter(self.scorer([window for text in texts for window in text]))
        results = [-sum(next(scores).loss for _ in text) for text in texts]
        return self._remembered("loglikelihood_rolling", requests, results)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to one of its stop strings."""
        alike: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(number)
        results: dict[int, str] = {}
        for wanted, numbers in alike.items():
            contexts = [self._context(requests[number].args[0]) for number in numbers]
            made = continue_prompts(self.trained, contexts, self._options(json.loads(wanted)))
            results |= zip(numbers, (continuation.text for continuation in made), strict=True)
        return self._remembered("generate_until", requests, [results[number] for number in range(len(requests))])

    def _pair(self, context: str, continuation: str) -> Window:
        """Return the ids of the context, and the ids that the continuation adds.

        Spaces between them belong to the continuation. After an empty context, the continuation follows the token that
        begins texts, which is not scored even if the continuation itself begins with it.

        Raises:
            InputError: one of the two has no token of its own, or the continuation is longer than the model's context.
        """
        if context:
            stripped = context.rstrip()
            before = self._encode(stripped)
            added = self._encode(context + continuation)[len(before) :]
        else:
            added = self.trained.tokenizer.encode(continuation)
            before = added[:1] if added[:1] == [self.beginning] else [self.beginning]
            added = added[1:] if added[:1] == [self.beginning] else added
        if not before or not added:
            raise InputError(
                f"context {context[-40:]!r} and continuation {continuation[:40]!r} have {len(before)} and {len(added)} "
                "tokens: each needs one; begin the continuation with a space, or where a word does"
            )
        if len(added) > self.length:
            raise InputError(
                f"the continuation {continuation[:40]!r} has {len(added)} tokens: "
                f"the model sees {self.length} (model.max_positions)"
            )
        return Window([*before, *added][-self.length - 1 :], len(added))

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the tokenizer's chat template, which the harness records in its results (--apply_chat_template)."""
        return (self.trained.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the text before the next answer, or before the rest of the last message.

        From this call on, names of special tokens in texts stand for these tokens.

        Raises:
            InputError: the tokenizer has no chat template.
        """
        self.chats = True
        text = Chat(self.trained.tokenizer).text(chat_history, opened=add_generation_prompt)
        if add_generation_prompt:
            return text
        said = chat_history[-1]["content"].strip()  # the answer continues the last message
        return text[: text.rindex(said) + len(said)]

    @property
    def tokenizer_name(self) -> str:
        """Return a name that distinguishes this tokenizer from others, for the harness's cache of requests."""
        return "-".join(map(str, self.trained.tokenizer.identity.values()))

    def _encode(self, text: str) -> list[int]:
        return self.trained.tokenizer.encode_marked(text) if self.chats else self.trained.encode(text)

    def _context(self, text: str) -> str | Prompt:
        return Prompt(text, tuple(self._encode(text))) if self.chats else text

    def _rolling(self, text: str) -> Iterator[Window]:
        """Cut a text into windows that do not overlap, except that the last has all the context that fits."""
        ids = [self.beginning, *self.trained.encode(text)]
        for first in range(0, len(ids) - 1, self.length):
            last = min(first + self.length, len(ids) - 1)
            yield Window(ids[max(0, last - self.length) : last + 1], last - first)

    def _options(self, wanted: dict[str, Any]) -> Options:
        """Translate the harness's `gen_kwargs` into `Options`.

        Raises:
            InputError: the new tokens leave no room for a context, or sampling is asked for without a temperature.
        """
        until = wanted.get("until") or []
        temperature = float(wanted.get("temperature", 0.0))
        drawn = wanted.get("do_sample", temperature > 0)
        if drawn and not temperature:
            raise InputError("gen_kwargs: do_sample=true needs a temperature above 0")
        sampling = Sampling(temperature if drawn else 0.0, wanted.get("top_k", 0), wanted.get("top_p", 1.0))
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        tokens = next((int(wanted[name]) for name in names if name in wanted), MAX_NEW_TOKENS)
        if tokens >= self.length:
            raise InputError(
                f"gen_kwargs: {tokens} new tokens leave no room for a context: the model sees {self.length} "
                f"(model.max_positions); set max_gen_toks"
            )
        return Options(
            tokens=tokens,
            sampling=sampling,
            stop=tuple(filter(None, [until] if isinstance(until, str) else until)),
            batch_size=self.batch_size,
            cut_prompts=True,
        )

    def _remembered(self, kind: str, requests: Sequence[Any], results: list[Any]) -> list[Any]:
        """Store the results in the harness's cache, if it has set one, and return them."""
        if hook := getattr(self, "cache_hook", None):
            for request, result in zip(requests, results, strict=True):
                hook.add_partial(kind, request.args, result)
        return results


def registered() -> type:
    """Return the model class named `megajax` in the harness, after registering it if need be.

    Raises:
        InputError: lm-evaluation-harness is not installed.
    """
    try:
        from lm_eval.api.model import LM  # noqa: PLC0415 - an option that few have installed
        from lm_eval.api.registry import model_registry  # noqa: PLC0415
    except ImportError as error:
        raise InputError(f"lm-evaluation-harness is not installed ({error}): pip install lm-eval") from None
    if "megajax" not in model_registry:
        model_registry.register("megajax", target=type("MegajaxLM", (HarnessModel, LM), {}))
    return model_registry.get("megajax")


@entry_point
def main(argv: list[str]) -> None:
    """Run the harness's command line."""
    registered()
    from lm_eval.__main__ import cli_evaluate  # noqa: PLC0415

    sys.argv[1:] = argv
    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
