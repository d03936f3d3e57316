"""The perplexity of a text is that of the model's own logits, whichever way it is computed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import app
from kernels import KERNELS
from test_benchmarks import SCRIPTS, result_of, run_script, script

from pallas_kernels import Backend
from vramjax.checkpoint.packed import open_packed
from vramjax.decode.sampler import Sampling
from vramjax.planning import engine_spec
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.policy import window


def test_perplexity(packed: Path, tmp_path: Path) -> None:
    output = run_script(
        "perplexity.py",
        f"--model={packed}",
        "--max_tokens=21",
        "--ways=prefill,tile,row",
        "--spec=chunk_rows=16",
        f"--out={tmp_path}",
    )
    result = result_of(tmp_path, output)
    rows = result["rows"]
    assert [row["arm"] for row in rows] == [f"reference, {way}" for way in ("prefill", "tile", "row")]
    for row in rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["mean_loss"]))
        assert row["mean_loss"] == pytest.approx(rows[0]["mean_loss"], abs=1e-5)
        assert row["largest_difference"] < 1e-4
    assert result["metrics"]["rows_independent"] and result["metrics"]["tokens"] == 21
    assert script("results_table").table(result).count("\n| reference, ") == 3


@pytest.mark.parametrize("backend", ["reference", KERNELS])
def test_losses_are_those_of_what_is_decoded(packed: Path, backend: Backend) -> None:
    """A text that the model wrote itself: each token has the loss that the logits which it was taken from give it."""
    weights = open_packed(packed)
    decoding, perplexity = script("decoding"), script("perplexity")
    (device,) = jax.devices()[:1]
    decoder = decoding.Decoder(weights, [device], prompt_tokens=5, max_tokens=6)
    spec = dataclasses.replace(decoder.spec, backend=backend, chunk_rows=16)
    store = decoding.pinned_store(weights, device)
    controller = Controller(store, window(store.num_layers, None), FusedTransfer(device))
    logits: list[np.ndarray] = []
    with contextlib.closing(store), decoder.engine([controller], spec=spec, compiled=False) as (engine, _):
        new = list(engine.generate(decoder.prompt, max_new_tokens=6, sampling=Sampling(), on_logits=logits.append))
        ids = [*decoder.prompt, *new]
        expected = [np.log(np.exp(row.astype(np.float64)).sum()) - row[i] for row, i in zip(logits, new, strict=True)]
        for way in ("prefill", "tile", "row"):
            losses = perplexity.token_losses(engine, decoder, ids, way)
            assert losses.shape == (10,)
            np.testing.assert_allclose(losses[4:], expected, atol=1e-5 if backend == "reference" else 1e-3)


def test_settings_of_an_engine(packed: Path) -> None:
    weights = open_packed(packed)
    with_settings = script("decoding").with_settings
    spec = engine_spec(weights.config, weights.groups, context=20, device=jax.devices()[0])
    changed = with_settings(spec, ["chunk_rows=32", "tile_rows=4"])
    assert (changed.chunk_rows, changed.tile_rows, changed.context) == (32, 4, 20)
    for setting in ("chunk_row=32", "chunk_rows", "chunk_rows=many", "config=3"):
        with pytest.raises(app.UsageError, match=re.escape(f"spec has {setting!r}; expected NAME=NUMBER")):
            with_settings(spec, [setting])


def test_what_cannot_be_read_is_refused(packed: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "perplexity.py"), f"--model={packed}", "--ways=sideways"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "expected some of prefill, tile, row" in done.stdout + done.stderr
