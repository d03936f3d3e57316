"""Which drafts of a sweep are the tokens that decoding without drafts gives, on the device.

A sequence takes consecutive rows, of one tile or of two: the last token that is certain, then its drafts. At every row
a token is drawn as decoding without drafts would draw it there (`sample_rows`: the same logits, and the same noise,
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
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def standing_rows(
    ids: jax.Array,  # int32 [T]: the token of each row
    drawn: jax.Array,  # int32 [T]: what was drawn from its logits, for the position after it
    is_draft: jax.Array,  # bool [T]: rows that may fall; the row before is of the same sequence
) -> jax.Array:  # bool [T]
    """The rows whose draws are new tokens: those that are no drafts, and of the drafts those that were right.

    Example: a sequence ends in 5 and has the drafts 6, 7, 8, so that `ids` is [5, 6, 7, 8]; [6, 7, 9, 1] was drawn. The
    first three rows stand: 6 and 7 were right, 8 was not, and the new tokens are 6, 7, 9. The 1 belongs to a sequence
    that has an 8 in it.
    """
    with jax.named_scope("accept"):
        index = jnp.arange(len(ids))
        is_wrong = is_draft & (ids != jnp.roll(drawn, 1))
        last_wrong = jax.lax.cummax(jnp.where(is_wrong, index, -1))
        last_certain = jax.lax.cummax(jnp.where(is_draft, -1, index))
        return last_wrong < last_certain


def newest_rows(
    stand: jax.Array,  # bool [T]: from `standing_rows`
    is_draft: jax.Array,  # bool [T]
) -> jax.Array:  # bool [T]
    """One row of each sequence, the last that stands: from its draw, and the position after it, decoding goes on.

    Example: of [5, 6, 7, 8], of which the first three stand, the third.
    """
    goes_on = jnp.roll(stand & is_draft, -1).at[-1].set(False)
    return stand & ~goes_on
