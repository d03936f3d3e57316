"""Many prompts through the API: what each gets, how they come, and what is said of prompts that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from interrupting import described, interrupt, places_of

import vramjax
from vramjax.errors import ConfigError, TextError, VramjaxError
from vramjax.language_model import LanguageModel

PROMPTS: list[Any] = [
    "Once upon a time",
    [1, 40, 50, 60, 70],
    [{"role": "user", "content": "Hi"}],
    "It's what they'll say, isn't it? " * 6,
    np.array([5, 6, 7]),
    "日本語 🙂",
    "yes!",
]
SAMPLING = vramjax.Sampling(temperature=1.2, top_k=40, seed=7)


@pytest.fixture(scope="module")
def model(packed: Path) -> Iterator[LanguageModel]:
    with vramjax.load(packed, keep=1, batch=3, speculate="off", progress=False) as model:
        yield model


def test_each_is_answered_as_if_alone(model: LanguageModel) -> None:
    limits, samplings = [9, 1, 20, 0, 5, 12, 7], [None, SAMPLING, None, None, SAMPLING, None, None]
    new: dict[int, list[vramjax.Token]] = {i: [] for i in range(len(PROMPTS))}
    logits: dict[int, list[bytes]] = {i: [] for i in range(len(PROMPTS))}
    answers = list(
        model.generate_many(
            PROMPTS,
            max_new_tokens=limits,
            sampling=samplings,
            on_token=lambda i, token: new[i].append(token),
            on_logits=lambda i, row: logits[i].append(row.tobytes()),
        )
    )
    stats = model.stats()
    assert sorted(answer.index for answer in answers) == list(range(len(PROMPTS)))
    assert [answer.index for answer in answers] != list(range(len(PROMPTS)))  # but as they ended
    for answer in answers:
        i, rows = answer.index, []
        alone = model.generate(
            PROMPTS[i],
            max_new_tokens=limits[i],
            sampling=samplings[i],
            on_logits=lambda row, rows=rows: rows.append(row.tobytes()),
        ).finish()
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)
        assert (answer.finish_reason, answer.num_prompt_tokens) == (alone.finish_reason, alone.num_prompt_tokens)
        assert logits[i] == rows
        assert [token.id for token in new[i]] == answer.token_ids
        assert "".join(token.text for token in new[i]) == answer.text
        assert (answer.prefill_s is None) == (not answer.token_ids)
        assert list(answer) == []  # it has been given whole
    num_new = sum(len(answer.token_ids) for answer in answers)
    assert (stats["num_answers"], stats["total_new_tokens"], stats["batch"]) == (6, num_new, 3)
    assert stats["total_prompt_tokens"] == sum(a.num_prompt_tokens for a in answers if a.token_ids)
    assert stats["tokens_per_sweep"] == num_new / stats["num_sweeps"] > 1.5
    assert stats["tokens_per_sweep"] <= stats["rows_per_sweep"] <= 3
    assert stats["uploads_per_token"] == 5 and stats["tokens_per_s"] > 0
    assert stats["token_ids"] == answers[-1].token_ids


def test_one_is_as_many(model: LanguageModel) -> None:
    first = model.generate("Hi", max_new_tokens=6, ignore_stop=True).finish()
    stats = model.stats()
    assert (stats["num_answers"], stats["total_new_tokens"], stats["num_sweeps"]) == (1, 6, 6)
    assert stats["tokens_per_sweep"] == stats["rows_per_sweep"] == 1.0
    (answer,) = model.generate_many(["Hi"], max_new_tokens=6, ignore_stop=True)
    assert answer.token_ids == first.token_ids
    assert list(model.generate_many([])) == []
    assert model.stats()["tokens_per_sweep"] is None


def test_more_prompts_than_slots_share_every_sweep(model: LanguageModel) -> None:
    answers = list(model.generate_many([[1, i + 5] for i in range(12)], max_new_tokens=10, ignore_stop=True))
    assert len(answers) == 12
    stats = model.stats()
    assert stats["num_sweeps"] == 40 and stats["tokens_per_sweep"] == 3.0


def test_answers_come_as_they_end(model: LanguageModel) -> None:
    answers = model.generate_many([[1, 5], [1, 6], [1, 7]], max_new_tokens=[9, 2, 4], ignore_stop=True)
    assert [answer.index for answer in answers] == [1, 2, 0]


def test_work_is_done_as_answers_are_asked_for(model: LanguageModel) -> None:
    sweeps = model.residency.sweeps
    answers = model.generate_many([[1, 5], [1, 6]], max_new_tokens=[1, 40], ignore_stop=True)
    assert model.residency.sweeps == sweeps
    next(answers)
    assert model.residency.sweeps == sweeps + 1
    first = model.generate("Hi", max_new_tokens=3, ignore_stop=True)
    next(first)
    with pytest.raises(VramjaxError, match="another generation has begun"):
        next(answers)
    assert len(first.finish().token_ids) == 3


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ("Hi", {}, "prompts is a text; expected several prompts"),
        ([1, 2, 3], {}, "prompt 0: the prompt is of type int; expected a text"),
        (["Hi", []], {}, "prompt 1: the prompt has no tokens"),
        (["Hi", [1, -1]], {}, "prompt 1: token id -1 at index 1"),
        (["Hi", [5] * 5000], {}, "prompt 1: the prompt has 5000 tokens; expected at most 4096"),
        (["Hi", "Ho"], {"max_new_tokens": [1]}, "max_new_tokens has 1 values; expected one, or one for each of 2"),
        (["Hi", "Ho"], {"max_new_tokens": [1, -1]}, "prompt 1: max_new_tokens is -1"),
        (["Hi"], {"max_new_tokens": "5"}, "prompt 0: max_new_tokens is '5'"),
        (["Hi"], {"sampling": [SAMPLING, None]}, "sampling has 2 values"),
        (["Hi"], {"sampling": ["greedy"]}, "prompt 0: sampling is 'greedy'"),
    ],
)
def test_what_cannot_be_used(model: LanguageModel, prompts: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, TextError), match=message):
        model.generate_many(prompts, **settings)


def test_a_model_that_is_closed(packed: Path) -> None:
    with vramjax.load(packed, batch=2, progress=False) as model:
        answers = model.generate_many(["Hi", "Ho"], max_new_tokens=[1, 9], ignore_stop=True)
        next(answers)
    with pytest.raises(VramjaxError, match="the model is closed"):
        next(answers)
    with pytest.raises(VramjaxError, match="the model is closed"):
        model.generate_many(["Hi"])


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "4", None, 1 << 31, 1 << 64])
def test_a_batch_that_is_none(packed: Path, bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch is .*; expected a whole number, 1 \.\. 2147483647"):
        vramjax.load(packed, batch=bad, progress=False)


def test_64_bits_are_refused(packed: Path) -> None:
    with jax.enable_x64(True), pytest.raises(ConfigError, match="jax_enable_x64 is on; expected it off"):
        vramjax.load(packed, progress=False)


def test_running_without_compiling_is_refused(packed: Path) -> None:
    with jax.disable_jit(), pytest.raises(ConfigError, match="jax_disable_jit is on; expected it off"):
        vramjax.load(packed, progress=False)


def test_numbers_of_numpy_count_as_any_others(packed: Path) -> None:
    """What follows from them, such as bytes, is more than their types hold."""
    of_numpy: dict[str, Any] = {
        "keep": np.int8(2),
        "context": np.int16(2000),
        "batch": np.int32(2),
        "speculate": np.int8(3),
    }
    stats = []
    plain: dict[str, Any] = {name: int(value) for name, value in of_numpy.items()}
    for asked in (of_numpy, plain):
        limit: Any = type(asked["speculate"])(3)
        with vramjax.load(packed, progress=False, **asked) as model:
            assert len(list(model.generate_many([[5], [6]], max_new_tokens=limit, ignore_stop=True))) == 2
            stats.append(model.stats())
    assert json.loads(json.dumps(stats[0]))["planned_peak_bytes"] == stats[1]["planned_peak_bytes"]


def test_a_failure_in_the_middle_spoils_nothing_else(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way is lost, and what is asked for next is right."""
    prompts = [[1, i + 5] for i in range(5)]
    expected = {a.index: a.token_ids for a in model.generate_many(prompts, max_new_tokens=6, ignore_stop=True)}
    calls = []

    def failing(step: Any) -> Any:
        def call(weights: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 33:
                jax.tree.map(lambda array: array.delete(), kv)
                raise RuntimeError("a layer failed")
            return step(weights, kv, *args, **kwargs)

        return call

    broken = model.generate_many(prompts, max_new_tokens=6, ignore_stop=True)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a layer failed"):
        for name in ("prefill_steps", "decode_steps"):
            patch.setattr(model._engine._loop, name, [failing(step) for step in getattr(model._engine._loop, name)])
        list(broken)
    assert list(broken) == []
    again = {a.index: a.token_ids for a in model.generate_many(prompts, max_new_tokens=6, ignore_stop=True)}
    assert again == expected


def test_an_interrupt_anywhere_spoils_nothing_else(model: LanguageModel) -> None:
    """Wherever sweeps are planned, queued and read."""
    prompts, files = (
        [[1, i + 5] for i in range(4)],
        ("/decode/decoding.py", "/decode/scheduler.py", "/decode/engine.py"),
    )

    def answers() -> dict[int, list[int]]:
        found = model.generate_many(prompts, max_new_tokens=[3, 1, 2, 2], ignore_stop=True)
        return {answer.index: answer.token_ids for answer in found}

    expected, num_interrupted = answers(), 0
    places = places_of(answers, *files)[::5]
    assert len(places) > 30
    for place in places:
        num_interrupted += interrupt(answers, place, *files)
        assert answers() == expected, described(place)
    assert num_interrupted > 30
