"""Which drafts are the tokens that decoding without drafts gives.

A sequence takes consecutive rows, of one tile or of several: the last token that is certain, then its drafts. At every
row a token is drawn as decoding without drafts would draw it there (`sample_rows`: the same logits, and the same noise,
which the seed and the position alone decide). A draft stands if the row before stands and has drawn that very token.

Why the tokens are those of decoding without drafts, and not only as likely as those: the row of the last certain token
sees what it would see without drafts, so its draw is the next token, whatever the draft was. If the draft is that very
token, the next row too sees what it would see, and so on. From the first draft that differs nothing is used. So
neither the depth nor the drafter, which may depend on the time that something took, can change what is decoded.

Nothing is lost over rejection sampling (Leviathan et al., 2023, arXiv:2211.17192) with drafts that are looked up: both
accept a draft x with probability p(x). A model that drafts takes the largest of its own scores plus the very noise with
which the token will be drawn. At a total variation distance of d the two then agree with a probability of at least
(1 - d) / (1 + d) (Daliri et al., 2024, arXiv:2408.07978). Rejection sampling accepts with 1 - d, which in simulations
was 0.01 to 0.03 more, and gives other tokens for other depths.

All of it is done on the host: where the next sweep begins depends on it, so nothing could be queued before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def new_tokens(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens that a sweep has added to a sequence: one for each draft that stands, and one more.

    Example: a sequence ends in 5 and has the drafts 6, 7, 8; [6, 7, 9, 1] was drawn. 6 and 7 were right, 8 was not, and
    the new tokens are 6, 7, 9. The 1 belongs to a sequence that has an 8 in it.

    Args:
      drafts: those of the sequence.
      drawn: what was drawn at each of its rows: one more.
    """
    assert len(drawn) == len(drafts) + 1
    return list(drawn[: num_right(drafts, drawn) + 1])


def num_right(drafts: Sequence[int], ids: Sequence[int]) -> int:
    """How many of the drafts are what came, with all before them."""
    same = (draft == token_id for draft, token_id in zip(drafts, ids, strict=False))
    return sum(itertools.takewhile(bool, same))
