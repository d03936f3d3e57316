"""One generation, timed token by token, with digests of all its logits if they are asked for."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vramjax.decode.engine import Engine
from vramjax.decode.sampler import Sampling


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one generation gave: `row` for the result file, and what other runs are compared with, token by token."""

    row: dict[str, Any]
    token_ids: list[int]
    digests: list[str]  # of the logits of all tokens up to each; empty if they were not looked at


def make_prompt(num_tokens: int, vocab_size: int) -> list[int]:
    """Ids that are as good as any others."""
    return [(7919 * i) % vocab_size for i in range(1, num_tokens + 1)]


def decode(engine: Engine, prompt: Sequence[int], num_tokens: int, *, check: bool) -> Run:
    """Decodes greedily. `check` digests all logits, which costs a copy to the host per token."""
    ids, times, digests, digest = [], [], [], hashlib.sha256()

    def on_logits(row: Any) -> None:
        digest.update(row.tobytes())
        digests.append(digest.hexdigest())

    for token_id in engine.generate(
        prompt, max_new_tokens=num_tokens, sampling=Sampling(), on_logits=on_logits if check else None
    ):
        ids.append(token_id)
        times.append(time.perf_counter())
    token_ms = [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
    row = {
        # The first token is waited for, and so is the last: between them are as many sweeps as tokens.
        "ms_per_token": statistics.mean(token_ms),
        "tokens": len(ids),
        "ids_sha256": hashlib.sha256(str(ids).encode()).hexdigest(),
        "logits_sha256": digests[-1] if digests else None,
    }
    return Run(row=row, token_ids=ids, digests=digests)
