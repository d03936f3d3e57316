"""How well a model predicts a fixed text, computed in every way that decoding computes: is anything lost on the way?

    python scripts/perplexity.py
    python scripts/perplexity.py --model=Qwen/Qwen3-8B --ways=prefill,tile,row

The text is fed in prefill chunks, and in decode tiles with all rows or with one row in use, by each backend. Perplexity
is exp of the mean loss of all tokens but the first. Losses are also compared, token by token, with those of the first
way: backends and ways round differently, and decode tiles must be the same, bit for bit, however many rows are in use.
On a CPU the reference is the only backend.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    import numpy as np
    from decoding import Decoder

    from vramjax.decode.engine import Engine

_TEXT = Path(__file__).resolve().parent / "data" / "prose_and_code.txt"
_WAYS = ("prefill", "tile", "row")

_MODEL = flags.DEFINE_string("model", "demo", "anything that `vramjax --model` takes")
_TEXT_FILE = flags.DEFINE_string("text", str(_TEXT), "a text in UTF-8")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 0, "only so many tokens of it; 0: all", lower_bound=0)
_BACKENDS = flags.DEFINE_list("backends", [], "such as triton,reference; default: both where there is a GPU")
_CHOSEN_WAYS = flags.DEFINE_list("ways", ["prefill", "tile"], f"of {', '.join(_WAYS)}")
_SPEC = flags.DEFINE_list("spec", [], "other numbers for the engine, such as chunk_rows=512")
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    if unknown := [way for way in _CHOSEN_WAYS.value if way not in _WAYS]:
        raise app.UsageError(f"ways has {unknown[0]!r}; expected some of {', '.join(_WAYS)}")
    start = time.perf_counter()
    from benchmarking import announce_result, open_weights, write_result

    name, weights = open_weights(_MODEL.value, "")

    import jax
    from decoding import Decoder, pinned_store, with_settings

    from vramjax.checkpoint.packed import Packed
    from vramjax.loading import open_tokenizer

    assert isinstance(weights, Packed)
    tokenizer, device = open_tokenizer(weights.path), jax.devices()[0]
    if tokenizer is None:
        raise app.UsageError(f"{name} has no tokenizer; expected a model that reads text")
    ids = list(tokenizer.encode(Path(_TEXT_FILE.value).read_text(encoding="utf-8")))
    ids = ids[: _MAX_TOKENS.value or None]
    if len(ids) < 2:
        raise app.UsageError(f"the text has {len(ids)} tokens; expected at least 2")
    store = pinned_store(weights, device)
    decoder = Decoder(weights, [device], prompt_tokens=len(ids), max_tokens=1)
    decoder.spec = with_settings(decoder.spec, _SPEC.value)
    backends = _BACKENDS.value or list(dict.fromkeys([decoder.spec.backend, "reference"]))
    rows, reference = [], None
    print(f"{name} on {device.device_kind}: {len(ids)} tokens", flush=True)
    for backend in backends:
        for way, losses in all_losses(decoder, store, ids, backend).items():
            reference = losses if reference is None else reference
            rows.append(row_of(backend, way, losses, reference))
            print(
                f"{backend}, {way}: perplexity {rows[-1]['perplexity']:.4f}, mean loss {rows[-1]['mean_loss']:.6f}; "
                f"losses differ from the first by at most {rows[-1]['largest_difference']:.1e}",
                flush=True,
            )
    by_arm = {(row["backend"], row["way"]): row for row in rows}
    metrics: dict[str, Any] = {"perplexity": rows[0]["perplexity"], "tokens": len(ids)}
    metrics["largest_difference"] = max(row["largest_difference"] for row in rows)
    tiles = [(by_arm.get((b, "tile")), by_arm.get((b, "row"))) for b in backends]
    if compared := [tile["losses_sha256"] == row["losses_sha256"] for tile, row in tiles if tile and row]:
        metrics["rows_independent"] = all(compared)
    path = write_result(f"perplexity-{name}", device, ceilings={}, metrics=metrics, rows=rows, out=_OUT.value)
    announce_result(path, seconds=time.perf_counter() - start)


def all_losses(decoder: Decoder, store: Any, ids: list[int], backend: str) -> dict[str, np.ndarray]:
    """The losses of each way, by one backend, with all layers on the device."""
    import dataclasses

    from vramjax.residency.controller import Controller
    from vramjax.residency.fused_transfer import FusedTransfer
    from vramjax.residency.policy import window

    spec = dataclasses.replace(decoder.spec, backend=backend)
    controller = Controller(store, window(store.num_layers, None), FusedTransfer(decoder.devices[0]))
    with decoder.engine([controller], spec=spec, compiled=False) as (engine, _):
        return {way: token_losses(engine, decoder, ids, way) for way in _CHOSEN_WAYS.value}


def token_losses(engine: Engine, decoder: Decoder, ids: list[int], way: str) -> np.ndarray:
    """-log p of each token of the text but the first, float32 [T - 1]."""
    import jax
    import numpy as np
    from stepping import forced_logits, forced_prefill

    from vramjax.model.head import logits

    spec = engine.spec
    size = {"prefill": spec.chunk_rows, "tile": spec.tile_rows, "row": 1}[way]
    if way == "prefill":
        project = jax.jit(logits, static_argnames="spec")
        blocks = (np.asarray(project(decoder.head, h, spec=spec.head)) for h in forced_prefill(engine, ids))
    else:
        blocks = forced_logits(engine, ids, rows=size)
    losses = []
    for i, block in enumerate(blocks):
        following = ids[i * size + 1 : (i + 1) * size + 1]
        scores = block[: len(following)].astype(np.float64)  # on the host, the same however it was computed
        highest = scores.max(axis=1)
        normaliser = highest + np.log(np.exp(scores - highest[:, None]).sum(axis=1))
        losses.append(normaliser - scores[np.arange(len(following)), following])
    return np.concatenate(losses)


def row_of(backend: str, way: str, losses: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """What is kept of the losses of one way."""
    import hashlib

    return {
        "arm": f"{backend}, {way}",
        "backend": backend,
        "way": way,
        "perplexity": math.exp(losses.mean()),
        "mean_loss": float(losses.mean()),
        "largest_difference": float(abs(losses - reference).max()),
        "losses_sha256": hashlib.sha256(losses.tobytes()).hexdigest(),
    }


if __name__ == "__main__":
    app.run(main)
