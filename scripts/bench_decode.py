"""What a token costs: time against the bytes that a GPU must read for it, host time, and every kernel.

    python scripts/bench_decode.py --geometry=qwen3-8b
    python scripts/bench_decode.py --model=demo --keep=4

Measures how fast the device reads its memory and multiplies bfloat16 matrices, then:

- decode: tokens after a prompt of `--context` tokens, one sequence. Bytes per token are those of all layers and of the
  output projection, as Q8 with their scales, and of the keys and values of the positions that are read; divided by the
  time and by the rate of reads they are the MBU.
- host: how long it takes to queue a token's work on an idle device, or its share of a program of several.
- tiles: sweeps with all rows of the decode tile in use, each in a sequence of its own or all in one, against one row
  of the same programs over the same cache.
- prefill: from a prompt of `--prefill_tokens` to its first token. FLOPs are 2 for each weight of the layers and token;
  attention and the output projection are not counted.
- kernels: what the device runs for a token, a full tile and a prompt, as the profiler sees it.

Ids and logits of two runs are compared bit by bit, and the first logits with those of the reference in plain jnp.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from decode_subject import Subject

_GEOMETRY = flags.DEFINE_string("geometry", "", "random weights of a model's shapes, such as qwen3-8b")
_MODEL = flags.DEFINE_string("model", "", "real weights instead: anything that `vramjax --model` takes")
_KEEP = flags.DEFINE_string("keep", "resident", "layers on the device; the others are streamed")
_CONTEXT = flags.DEFINE_integer("context", 512, "tokens of the prompt before those that are timed", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 32, "tokens to decode in each timed run", lower_bound=3)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "timed runs of everything", lower_bound=1)
_PREFILL_TOKENS = flags.DEFINE_integer("prefill_tokens", 2048, "tokens of the prompt that is timed", lower_bound=1)
_REFERENCE_TOKENS = flags.DEFINE_integer(
    "reference_tokens", 4, "tokens whose logits are compared with the reference; 0: none", lower_bound=0
)
_SPEC = flags.DEFINE_list("spec", [], "other numbers for the engine, such as chunk_rows=512")
_PROFILE = flags.DEFINE_bool("profile", True, "take profiles of kernels, on a GPU")
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    if _KEEP.value != "resident" and not _KEEP.value.isdecimal():
        raise app.UsageError(f"keep is {_KEEP.value!r}; expected a number of layers, or resident")
    start = time.perf_counter()
    from benchmarking import announce_result, open_weights, write_result

    name, weights = open_weights(_MODEL.value, _GEOMETRY.value)

    import jax
    from ceilings import tell_ceilings
    from decode_report import metrics_of, print_rows, with_rates
    from decode_subject import Subject
    from decoding import with_settings

    device = jax.devices()[0]
    ceilings = tell_ceilings(device, since=start)
    keep = None if _KEEP.value == "resident" else int(_KEEP.value)
    subject = Subject(weights, device, keep=keep, context=_CONTEXT.value, tokens=_TOKENS.value)
    subject.decoder.spec = with_settings(subject.decoder.spec, _SPEC.value)
    print(
        f"{name}: {subject.num_layers} layers of {subject.layer_bytes / 1e6:.1f} MB, {subject.num_streamed} of them "
        f"streamed; {subject.token_bytes / 1e6:.0f} MB a token take at least "
        f"{subject.token_bytes / ceilings['device_read_gb_per_s'] / 1e6:.2f} ms; ready after "
        f"{time.perf_counter() - start:.0f} s",
        flush=True,
    )
    checked, rows = measure(subject)
    rows = with_rates(rows, ceilings)
    print_rows(rows)
    path = write_result(
        f"decode-{name}" if subject.num_streamed == 0 else f"decode-{name}-keep-{keep}",
        device,
        ceilings=ceilings,
        metrics=metrics_of(name, rows, checked, is_resident=subject.num_streamed == 0),
        rows=rows,
        out=_OUT.value,
    )
    announce_result(path, seconds=time.perf_counter() - start)


def measure(subject: Subject) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the checks say, and a row for everything that was timed."""
    from vramjax.progress import progress_bar

    profile, rounds = _PROFILE.value and subject.device.platform != "cpu", _ROUNDS.value
    with progress_bar("Measuring", total=4 + bool(_REFERENCE_TOKENS.value), unit="items") as advance:
        with subject.decoder.engine(subject.controllers()) as (engine, _):
            run, checked = subject.check(engine)
            advance(1)
            rows = [subject.time_decode(engine, run, rounds, profile=profile)]
            advance(1)
        rows += subject.time_tiles(rounds, profile=profile)
        advance(1)
        rows.append(subject.time_prefill(_PREFILL_TOKENS.value, rounds, profile=profile))
        advance(1)
        if _REFERENCE_TOKENS.value:
            checked |= subject.compare_with_reference(_REFERENCE_TOKENS.value)
            advance(1)
    return checked, rows


if __name__ == "__main__":
    app.run(main)
