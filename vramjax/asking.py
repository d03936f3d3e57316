"""From prompts to what an engine is asked for, and from its tokens to answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vramjax.decode.decoding import NewToken, check_prompt
from vramjax.decode.sampler import Sampling
from vramjax.decode.scheduler import Request
from vramjax.decode.spec import EngineSpec
from vramjax.errors import ConfigError, TextError
from vramjax.generation import Generation, Token
from vramjax.text.prompt import Message, encode_prompt
from vramjax.text.tokenizer import Tokenizer
from vramjax.whole_number import is_whole

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt that was found to be good, as an engine is asked to go on with it."""

    request: Request
    max_new_tokens: int  # the request's limit may be less: that of the context

    def generation(self, ids: Iterator[int], tokenizer: Tokenizer | None, index: int = 0) -> Generation:
        """The answer whose token ids are to come from `ids`, or to be added."""
        return Generation(
            ids,
            limit=self.request.limit,
            max_new_tokens=self.max_new_tokens,
            num_prompt_tokens=len(self.request.prompt_ids),
            stop_ids=self.request.stop_ids,
            tokenizer=tokenizer,
            index=index,
        )


def ask(
    prompt: Prompt,
    *,
    max_new_tokens: int,
    sampling: Sampling | None,
    chat: bool | None,
    stop_ids: frozenset[int],
    tokenizer: Tokenizer | None,
    spec: EngineSpec,
) -> Asked:
    """Checks and encodes a prompt.

    Raises:
      ConfigError, TextError: the prompt or a setting cannot be used.
    """
    if not is_whole(max_new_tokens) or max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens!r}; expected a whole number, 0 or more")
    if not isinstance(sampling, Sampling | None):
        raise ConfigError(f"sampling is {sampling!r}; expected a vramjax.Sampling, or None for greedy decoding")
    max_new_tokens = int(max_new_tokens)  # which numpy's would pass on to counters
    ids = encode_prompt(tokenizer, prompt, chat=chat, context=spec.context)
    check_prompt(ids, spec.config, spec.context)
    limit = spec.max_new_tokens(len(ids), max_new_tokens)
    request = Request(prompt_ids=ids, limit=limit, stop_ids=stop_ids, sampling=sampling)
    return Asked(request=request, max_new_tokens=max_new_tokens)


def ask_many(
    prompts: Iterable[Prompt],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling | None] | None,
    **settings: Any,
) -> list[Asked]:
    """`ask` for each prompt, whose place an error names; of what is a sequence, each prompt has its own.

    Raises:
      ConfigError, TextError: as above, or there are more or fewer values than prompts.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is a text; expected several prompts, such as a list of texts")
    prompts = list(prompts)
    limits = _for_each(max_new_tokens, len(prompts), "max_new_tokens")
    samplings = _for_each(sampling, len(prompts), "sampling")
    asked = []
    for i, (prompt, limit, own) in enumerate(zip(prompts, limits, samplings, strict=True)):
        try:
            asked.append(ask(prompt, max_new_tokens=limit, sampling=own, **settings))
        except (ConfigError, TextError) as error:
            raise type(error)(f"prompt {i}: {error}") from error
    return asked


def finished(
    tokens: Iterator[NewToken], generations: Sequence[Generation], on_token: Callable[[int, Token], None] | None
) -> Iterator[Generation]:
    """The generations, each with all of its tokens, in the order in which they end."""
    open_ones = {i: generation for i, generation in enumerate(generations) if generation.finish_reason is None}
    for generation in generations:
        generation.begin()
        if generation.finish_reason is not None:  # without a token
            yield generation
    for new in tokens:
        token = open_ones[new.request_idx].add(new.id)
        if on_token is not None:
            on_token(new.request_idx, token)
        if new.is_last:
            yield open_ones.pop(new.request_idx)


def _for_each(value: Any, num_prompts: int, name: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise ConfigError(f"{name} has {len(value)} values; expected one, or one for each of {num_prompts} prompts")
    return list(value)
