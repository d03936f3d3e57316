"""In which ways prompts are decoded whose bits are compared: so many at a time, with such drafts. Needs no JAX."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from absl import app

NO_DRAFTS, LOOKUP, MODEL = "no drafts", "n-gram", "draft model"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to decode all prompts."""

    batch: int
    depth: int
    drafter: str
    is_streamed: bool
    ends_early: bool  # each answer at a stop id of its own, anywhere in it; else all are of the full length

    def __str__(self) -> str:
        where = "streamed" if self.is_streamed else "resident"
        drafts = f"depth {self.depth}, {self.drafter}" if self.depth else NO_DRAFTS
        return f"bits: batch {self.batch}, {drafts}, {where}"


def make_arms(batches: Sequence[int], depths: Sequence[int], *, has_model: bool) -> list[Arm]:
    """As many arms as the longer of both lists has; the shorter one begins anew, and anew.

    What else differs goes by a depth's place, so that any eight neighbours have all there is of it, and is the other
    way round when depths begin anew: each of them is then had in both ways.

    Example: of depths 0 ... 15 the first time 2 is looked up, resident, and of full length; the second time a model
    drafts, layers are streamed, and answers end early.
    """
    arms = []
    for i in range(max(len(batches), len(depths)) if batches and depths else 0):
        again, place = divmod(i, len(depths))
        drafter = MODEL if has_model and (place + again) % 2 else LOOKUP
        arms.append(
            Arm(
                batch=batches[i % len(batches)],
                depth=depths[place],
                drafter=drafter if depths[place] else NO_DRAFTS,
                is_streamed=(place // 2 + again) % 2 == 0,
                ends_early=(place // 4 + again) % 2 == 1,
            )
        )
    return arms


def numbers(name: str, items: Sequence[str], *, least: int, most: int) -> list[int]:
    """The numbers of a flag: of "1-3" and "8" they are 1, 2, 3 and 8.

    Raises:
      UsageError: one is no such number or range.
    """
    found = []
    for item in items:
        first, dash, last = item.partition("-")
        is_range = first.isdecimal() and (last.isdecimal() or not dash)
        each = range(int(first), int(last or first) + 1) if is_range else range(0)
        if not each or each[0] < least or each[-1] > most:
            raise app.UsageError(
                f"{name} has {item!r}; expected numbers {least} .. {most}, and ranges such as {least}-{most}"
            )
        found += each
    return found


def random_prompts(num_prompts: int, vocab_size: int, *, longest: int = 160) -> list[list[int]]:
    """Ids that mean nothing, of mixed lengths; many of them stand there more than once, in the same order."""
    rng, prompts = random.Random(0), []
    for _ in range(num_prompts):
        pieces = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))] for _ in range(4)]
        length = rng.randint(1, longest)
        prompts.append([token_id for _ in range(length) for token_id in rng.choice(pieces)][:length])
    return prompts
