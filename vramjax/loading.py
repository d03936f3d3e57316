"""From the name of a model to one that is ready: what `vramjax.load` does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jax

from vramjax.checkpoint.packed import Packed
from vramjax.checkpoint.resolve import open_model
from vramjax.draft_model import check_same_tokens, errors_name_draft_model
from vramjax.errors import ConfigError
from vramjax.language_model import LanguageModel
from vramjax.memory_request import HostChoice, Speculate
from vramjax.residency.controller import ReleaseMode
from vramjax.residency.streaming import PolicyName
from vramjax.text.tokenizer import Tokenizer


def load(
    model: str | Path,
    *,
    device_budget: int | str | None = None,
    keep: int | None = None,
    policy: PolicyName = "pinned_ring",
    release: ReleaseMode = "pool",
    warm_up: bool | None = None,
    context: int | None = None,
    host: HostChoice = "auto",
    host_budget: int | str | None = None,
    devices: Sequence[int | jax.Device] | None = None,
    batch: int = 1,
    batch_or_fewer: bool = False,
    speculate: Speculate = "auto",
    draft_model: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> LanguageModel:
    """Loads a model for decoding.

    Args:
      model: a packed directory, a Hugging Face directory, a GGUF file, a Hub id or "demo". What is not packed is
        converted once into a cache.
      device_budget: bytes of device memory at the peak, everything counted: a number, "6GiB", or "auto": what is free
        now, other programs considered, less 512 MiB. As many layers stay on the device as fit, the others are
        streamed. None is "auto", unless `keep` is given.
      keep: a budget in layers instead: those that stay on the device.
      policy: "pinned_ring", which uploads least; or, for comparison, "past" (`keep` layers behind the current one,
        twice as many at the peak) or "both_sides", a worse one.
      release: "pool" recycles device memory; "free" gives it back each time, for comparison.
      warm_up: upload before the first prompt what a sweep begins with. None: if any layer stays on the device for good,
        under "pinned_ring" or as all do.
      context: positions that prompt and answer may take; None: 4096, or the model's maximum if that is less.
      host: where streamed layers wait: "pinned" in host memory, all of them, or "mapped" on disk, from where they pass
        through a few buffers; "auto" is what fits.
      host_budget: bytes of host memory for the whole process; None: what is free.
      devices: devices, or their places in `jax.devices()`; None is JAX's first one. Layers are dealt out to several in
        turns, and each streams its own over its own link. `device_budget` and `keep` are then what each of them may
        take; the first also holds the embedding and lm_head.
      batch: prompts that `generate_many` may work on at the same time. Each has a KV cache of `context` positions,
        which counts as device memory; a sweep over the layers gives each of them a token, in about the time of one.
      batch_or_fewer: fewer where that is faster, or where memory has no room for so many, instead of a BudgetError.
      speculate: guesses of what comes next, looked up in prompt and answer, which the next sweep over the layers
        checks: those that are right are tokens that need no sweep of their own. What is decoded is the same, to the
        bit. "auto": where layers are streamed, as many as make it faster; "off"; or so many (0 .. 15) in each sweep.
      draft_model: a small model that guesses too, as `model`; it must have the same tokenizer. All of it stays on the
        (first) device, with a KV cache of its own, which counts as device memory. With "auto" it guesses where that
        is faster than without or what is looked up, be layers streamed or not; with so many it alone guesses.
      cache_dir: where conversions are kept; None: $VRAMJAX_CACHE or ~/.cache/vramjax.
      progress: whether to show bars and notes on stderr.

    JAX hands out the memory of a GPU from a pool, which it reserves when it starts: if nothing else is said three
    quarters of the GPU, however small the budget is, and "auto" is then what is free of those. The command `vramjax`
    has it reserve what was asked for; a program that wants the same sets XLA_CLIENT_MEM_FRACTION (the part of the GPU,
    with 256 MiB to spare) before its first use of JAX.

    Raises:
      CheckpointError, ConfigError, TextError: the model or an argument cannot be used.
      BudgetError: it does not fit; the message says what would.
    """
    if not isinstance(cache_dir, str | os.PathLike | None):
        raise ConfigError(f"cache_dir is {cache_dir!r}; expected the path of a directory, or None")
    directory = Path(os.path.expanduser(cache_dir)) if cache_dir else None
    packed = open_model(model, cache_dir=directory, progress=progress)
    tokenizer = open_tokenizer(packed.path)
    draft = None
    if draft_model is not None:
        draft = open_draft_model(draft_model, packed, tokenizer, cache_dir=directory, progress=progress)
    return LanguageModel(
        packed,
        tokenizer,
        device_budget=device_budget,
        keep=keep,
        policy=policy,
        release=release,
        warm_up=warm_up,
        context=context,
        host=host,
        host_budget=host_budget,
        devices=devices,
        batch=batch,
        batch_or_fewer=batch_or_fewer,
        speculate=speculate,
        draft=draft,
        progress=progress,
    )


def open_draft_model(
    draft_model: str | Path, packed: Packed, tokenizer: Tokenizer | None, *, cache_dir: Path | None, progress: bool
) -> Packed:
    """A model that may draft for another one, of which there are the files and the tokenizer.

    Raises:
      CheckpointError, TextError: it cannot be used.
      ConfigError: it has other tokens.
    """
    with errors_name_draft_model():
        draft = open_model(draft_model, cache_dir=cache_dir, progress=progress)
        draft_tokenizer = open_tokenizer(draft.path)
    check_same_tokens((draft.config, draft_tokenizer), (packed.config, tokenizer))
    return draft


def open_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a packed directory, or None if it has none: then prompts are token ids.

    Raises:
      TextError: there is one, and it cannot be used.
    """
    return Tokenizer.from_dir(path) if (path / "tokenizer.json").exists() else None
