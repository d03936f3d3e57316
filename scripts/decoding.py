"""Runs of an engine, one generation each, timed token by token: what every benchmark of streamed layers shares."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import app

from vramjax.decode.engine import Engine
from vramjax.decode.sampler import Sampling
from vramjax.decode.self_test import check_kernels
from vramjax.decode.spec import EngineSpec
from vramjax.host_tier import upload_head
from vramjax.planning import engine_spec
from vramjax.progress import progress_bar
from vramjax.residency.controller import Controller
from vramjax.residency.geometry import geometry_of
from vramjax.residency.host_store import HostStore
from vramjax.residency.multi import MultiController
from vramjax.residency.transfer import DeviceTransfer

if TYPE_CHECKING:
    from vramjax.checkpoint.packed import Packed
    from vramjax.checkpoint.random_weights import RandomWeights


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one generation gave: `row` for the result file, and what other runs are compared with, token by token."""

    row: dict[str, Any]
    token_ids: list[int]
    digests: list[str]  # of the logits of all tokens up to each; empty if they were not looked at


def make_prompt(num_tokens: int, vocab_size: int) -> list[int]:
    """Ids that are as good as any others."""
    return [(7919 * i) % vocab_size for i in range(1, num_tokens + 1)]


def with_settings(spec: EngineSpec, settings: Sequence[str]) -> EngineSpec:
    """A spec with other numbers, such as `tile_rows=8`, in fields that have numbers."""
    numbers = {field.name for field in dataclasses.fields(spec) if field.type in ("int", "int | None")}
    changes = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in numbers or not value.isdecimal():
            raise app.UsageError(f"spec has {setting!r}; expected NAME=NUMBER with one of {', '.join(sorted(numbers))}")
        changes[name] = int(value)
    return dataclasses.replace(spec, **changes)


def pinned_store(weights: Packed | RandomWeights, device: jax.Device, layers: Sequence[int] | None = None) -> HostStore:
    """Layers, all of them unless others are given, in pinned memory; with a bar while they come."""
    layers = range(weights.config.num_layers) if layers is None else layers
    geometry = geometry_of({name: jax.ShapeDtypeStruct(*array) for name, array in weights.layout.shapes.items()})

    def read_into(index: int, views: dict[str, Any]) -> None:
        weights.read_layer_into(layers[index], views)

    with progress_bar("Loading", total=len(layers) * geometry.num_bytes) as advance:
        return HostStore.read(read_into, [geometry] * len(layers), device, num_threads=16, progress=advance)


class Decoder:
    """What runs share: the programs, a prompt, and both ends of the model, which are on the first device.

    Invariant: runs have an engine and a KV cache each, and differ in nothing but the controllers that they are given.

    Example: `Decoder(weights, [device], prompt_tokens=32, max_tokens=16).run([controller], 16, check=False).row`.
    """

    def __init__(
        self, weights: Packed | RandomWeights, devices: Sequence[jax.Device], *, prompt_tokens: int, max_tokens: int
    ) -> None:
        for device in devices:
            check_kernels(device)
        self.devices = list(devices)
        context = prompt_tokens + max_tokens
        self.spec = engine_spec(weights.config, weights.groups, context=context, device=devices[0])
        self.head = upload_head(weights, DeviceTransfer(devices[0]))
        self.prompt = make_prompt(prompt_tokens, weights.config.vocab_size)

    def run(self, controllers: Sequence[Controller], num_tokens: int, *, check: bool) -> Run:
        """One greedy generation over the layers of these controllers, on a device each; they are closed afterwards.

        `check` compiles first, and digests all logits, which costs a copy to the host per token; else time it.
        """
        with self.engine(controllers, compiled=check) as (engine, layers):
            run = self.generate(engine, num_tokens, check=check)
            stats = layers.stats
        row = {
            "num_layers": layers.num_layers,
            **run.row,
            "uploads_per_token": stats.last_sweep_uploads,
            "bytes_per_token": stats.last_sweep_bytes_uploaded,
            "entries": 7 * stats.resident_layers_end + 1,
            "peak_layers": stats.peak_resident_layers,
            "peak_layer_bytes": stats.peak_device_bytes,
        }
        return dataclasses.replace(run, row=row)

    @contextlib.contextmanager
    def engine(
        self, controllers: Sequence[Controller], *, spec: EngineSpec | None = None, compiled: bool = True
    ) -> Iterator[tuple[Engine, MultiController]]:
        """An engine over the layers of these controllers, warmed up; they are closed afterwards.

        `spec` is what to compile instead of the programs that all runs share.
        """
        with MultiController(controllers) as layers:
            devices = self.devices[: len(controllers)]
            engine = Engine(spec=spec or self.spec, head=self.head, controller=layers, device=devices)
            if compiled:
                engine.compile()
            layers.warm_up()
            yield engine, layers

    def generate(self, engine: Engine, num_tokens: int, *, check: bool) -> Run:
        """One greedy generation of an engine; its row says how long a token took."""
        ids, times, digests, digest = [], [], [], hashlib.sha256()
        finite = []

        def on_logits(row: np.ndarray) -> None:
            digest.update(row.tobytes())
            finite.append(bool(np.isfinite(row).all()))
            digests.append(digest.hexdigest())

        for token_id in engine.generate(
            self.prompt, max_new_tokens=num_tokens, sampling=Sampling(), on_logits=on_logits if check else None
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
            "logits_finite": all(finite) if finite else None,
        }
        return Run(row=row, token_ids=ids, digests=digests)
