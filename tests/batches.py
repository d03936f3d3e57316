"""Engines of many slots, requests of all kinds, and what these get: shared by tests of decoding."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax

from vramjax.checkpoint.packed import Packed
from vramjax.decode.decoding import Decoding
from vramjax.decode.engine import Engine
from vramjax.decode.sampler import Sampling
from vramjax.decode.scheduler import Request
from vramjax.decode.speculation import Speculation
from vramjax.host_tier import upload_head
from vramjax.planning import engine_spec
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.host_store import HostStore
from vramjax.residency.policy import window

CONTEXT = 256
Answer = tuple[list[int], list[bytes]]  # ids, and the logits that they came from
MakeEngine = Callable[..., Engine]


def make_engine(
    packed: Packed, *, keep: int | None = None, speculation: Speculation | None = None, **changes: Any
) -> Engine:
    """An engine of a model; `changes` are of its spec."""
    device = jax.devices()[0]
    transfer = FusedTransfer(device)
    spec = engine_spec(packed.config, packed.groups, context=CONTEXT, device=device)
    store = HostStore((packed.load_layer(i) for i in range(packed.config.num_layers)), device)
    controller = Controller(store, window(packed.config.num_layers, keep), transfer)
    head = upload_head(packed, transfer)
    spec = dataclasses.replace(spec, **changes)
    return Engine(spec=spec, head=head, controller=controller, device=device, speculation=speculation)


def answers(engine: Engine, requests: list[Request]) -> tuple[list[Answer], Decoding]:
    """What each request gets if all are decoded together."""
    found: list[Answer] = [([], []) for _ in requests]
    decoding = engine.decode(requests, on_logits=lambda i, row: found[i][1].append(row.tobytes()))
    ended = set()
    for token in decoding:
        assert token.request_idx not in ended
        found[token.request_idx][0].append(token.id)
        if token.is_last:
            ended.add(token.request_idx)
    assert ended == {i for i, request in enumerate(requests) if request.limit}
    return found, decoding


def make_requests(count: int, vocab_size: int, *, longest: int = 150, limit: int = 12) -> list[Request]:
    """Of all kinds: short and long prompts, greedy and drawn, with and without an end at a stop id."""
    rng = random.Random(5)
    stops = frozenset(range(0, vocab_size, 7))
    samplings = [None, None, Sampling(temperature=0.9, seed=3), Sampling(temperature=1.3, top_k=20, top_p=0.8, seed=9)]
    return [
        Request(
            prompt_ids=[1, *(rng.randrange(2, vocab_size - 8) for _ in range(rng.choice([0, 3, 8, 40, longest - 1])))],
            limit=rng.randint(1, limit),
            stop_ids=stops if i % 3 else frozenset(),
            sampling=dataclasses.replace(samplings[i % 4], seed=i) if samplings[i % 4] else None,  # pyright: ignore
        )
        for i in range(count)
    ]


def assert_same(actual: list[Answer], expected: list[Answer]) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a[0] == b[0], i
        assert a[1] == b[1], i


def interrupted_after(num_passing: int, step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is interrupted once, after so many calls."""
    calls = itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == num_passing:
            raise KeyboardInterrupt
        return step(*args, **options)

    return call
