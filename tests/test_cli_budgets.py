"""The command line within a budget of device or host memory: as much stays as fits, and the answers do not change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commands import IDS, NUM_LAYERS, Run

from vramjax.residency.budget import AUTO_RESERVE_BYTES

pytestmark = pytest.mark.usefixtures("no_array_is_left")


def test_a_budget_is_kept(decode: Any, run: Run, packed: Path) -> None:
    """As many layers stay as fit, to the byte, and the smallest budget of which an error speaks is enough."""
    prompt = (f"--prompt_ids={IDS}", "--ignore_stop")
    _, resident = decode(*prompt)
    layer_bytes = resident["layer_bytes"]
    largest, smallest = resident["planned_peak_bytes"], resident["planned_peak_bytes"] - 4 * layer_bytes
    for budget, keep in (
        (2 * largest, 5),
        (largest, 5),
        (largest - 1, 4),
        (largest - layer_bytes, 4),
        (largest - layer_bytes - 1, 3),
        (smallest, 1),
    ):
        _, stats = decode(*prompt, f"--device_budget={budget}")
        assert stats["peak_resident_layers"] == keep
        assert stats["planned_peak_bytes"] == largest - (NUM_LAYERS - keep) * layer_bytes <= budget
        assert stats["device_budget"] == budget
        assert stats["token_ids"] == resident["token_ids"]
        streamed = 0 if keep == NUM_LAYERS else NUM_LAYERS - keep + 1
        assert stats["uploads_per_token"] == streamed == NUM_LAYERS - stats["pinned_layers"]
        assert stats["bytes_streamed_per_token"] == streamed * layer_bytes
    too_small = run(f"--model={packed}", *prompt, "--max_new_tokens=12", f"--device_budget={smallest - 1}").error()
    named = re.search(r"expected at least ([\d.]+ MiB) for a context of 17", too_small)
    assert named, too_small
    assert decode(*prompt, f"--device_budget={named[1]}")[1]["peak_resident_layers"] >= 1


def test_a_budget_that_a_shorter_context_fits(decode: Any, run: Run, packed: Path) -> None:
    prompt = (f"--model={packed}", f"--prompt_ids={IDS}")
    _, stats = decode(*prompt, "--keep=1", "--context=1000")
    message = run(*prompt, "--context=4000", f"--device_budget={stats['planned_peak_bytes']}").error()
    named = re.search(r"or lower the context to (\d+), which fits$", message)
    assert named and 1000 <= int(named[1]) < 4000, message
    budget = f"--device_budget={stats['planned_peak_bytes']}"
    assert decode(*prompt, budget, f"--context={named[1]}")[1]["peak_resident_layers"] == 1
    assert "expected at least" in run(*prompt, budget, f"--context={int(named[1]) + 1}").error()
    assert run(*prompt, "--device_budget=1B").error().endswith(": raise it to that")  # no context is short enough


def test_nothing_asked_is_what_is_free(decode: Any, run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = (f"--prompt_ids={IDS}", "--ignore_stop", "--progress")
    done, resident = decode(*prompt)
    assert resident["policy"] == "resident" and "note:" not in done.err
    free = AUTO_RESERVE_BYTES + resident["planned_peak_bytes"]
    for left, keep in ((0, 5), (1, 4), (2 * resident["layer_bytes"], 3)):
        monkeypatch.setattr("vramjax.planning.free_device_bytes", lambda device, left=left: free - left)
        for asked in ((), ("--device_budget=auto",)):
            done, stats = decode(*prompt, *asked)
            assert stats["peak_resident_layers"] == keep
            assert stats["device_budget"] == resident["planned_peak_bytes"] - left
            assert stats["token_ids"] == resident["token_ids"]
            notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
            if keep == NUM_LAYERS:
                assert not notes
            else:
                (note,) = notes
                assert f"{stats['uploads_per_token']} of them are streamed for each token" in note
    assert "note:" not in decode(*prompt, "--noprogress")[0].err
    assert "note:" not in decode(*prompt, "--keep=2")[0].err


@pytest.mark.parametrize("keep", ["--keep=1", "--keep=3", "--keep=2 --policy=past"])
def test_every_host_tier_gives_the_same_answer(decode: Any, keep: str) -> None:
    prompt = (f"--prompt_ids={IDS}", "--ignore_stop", *keep.split())
    _, pinned = decode(*prompt, "--host=pinned")
    _, mapped = decode(*prompt, "--host=mapped")
    assert (pinned["host"], mapped["host"]) == ("pinned", "mapped")
    assert mapped["host_buffers"] == 8
    assert pinned["token_ids"] == mapped["token_ids"] == decode(f"--prompt_ids={IDS}", "--ignore_stop")[1]["token_ids"]
    assert pinned["uploads"] == mapped["uploads"] > 12


def test_what_does_not_fit_into_host_memory_is_read_from_disk(
    decode: Any, run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = (f"--prompt_ids={IDS}", "--ignore_stop", "--keep=1", "--progress")
    done, pinned = decode(*prompt)
    assert "note:" not in done.err
    asked = (f"--model={packed}", *prompt, "--max_new_tokens=12")
    monkeypatch.setattr("vramjax.planning.process_host_bytes", lambda: 1 << 30)
    monkeypatch.setattr("vramjax.host_tier.host_bytes", lambda geometry: 1 << 30)  # as if layers were that large
    message = run(*asked, "--host_budget=1MiB").error()
    smallest = re.search(r"host_budget is .*; expected at least ([\d.]+) GiB: raise it to that", message)
    assert smallest and 3.25 <= float(smallest[1]) < 4
    done, mapped = decode(*prompt, f"--host_budget={smallest[1]}GiB")
    assert (mapped["host"], mapped["host_buffers"], mapped["token_ids"]) == ("mapped", 2, pinned["token_ids"])
    assert "note: the layers that are streamed do not fit into host memory" in done.err
    assert "host_budget is" in run(*asked, f"--host_budget={smallest[1]}GiB", "--host=pinned").error()
    assert decode(*prompt, "--host_budget=7GiB")[1]["host"] == "pinned"
    for command in ((*asked, "--keep=9"), ("plan", f"--model={packed}")):  # also where nothing is streamed
        assert "host_budget is" in run(*command, "--host_budget=1100MiB").error()
