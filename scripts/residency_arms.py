"""The arms of the residency benchmark: which there are, and one run of one on weights that all of them share."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarking import HighestSeen
from decoding import Decoder, Run

from vramjax.planning import device_bytes
from vramjax.progress import progress_bar
from vramjax.residency.byte_policy import window_within
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.host_store import Store
from vramjax.residency.policy import window
from vramjax.residency.schedule import Schedule
from vramjax.residency.transfer import DeviceTransfer
from vramjax.units import parse_bytes

# How a layer gets to the device: inside the layer step's program, in a program of its own, both into recycled memory,
# or into new memory, with the old given back.
COPIES = ("fused", "separate", "eager")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of the residency controller.

    Example: `Arm(policy="past", keep=4, share=25)` is the past window whose peak is within a quarter of the weights.
    """

    policy: str  # resident, or a name that `window` knows
    keep: int
    copies: str = "fused"  # one of COPIES
    allocator: str = "default"  # default, platform: really gives memory back to the driver
    share: int = 0  # percent of the weights that layers on the device may take; 0: so many were not asked for
    budget_bytes: int = 0  # for everything on the device; 0: what the window needs

    @property
    def name(self) -> str:
        parts = ["resident" if self.policy == "resident" else f"{self.policy} {self.keep}"]
        if self.share:
            parts.append(f"{self.share} % of weights")
        elif self.budget_bytes:
            parts.append(f"{self.budget_bytes / 2**30:.2f} GiB")
        if self.copies == "separate":
            parts.append("separate copies")
        if self.copies == "eager":
            parts.append("new memory" if self.allocator == "default" else "really freed")
        if self.allocator != "default":
            parts.append(f"{self.allocator} allocator")
        return ", ".join(parts)

    @property
    def is_bounded(self) -> bool:
        """Whether device memory is bounded by slots: else it is by how far the host runs ahead of the device."""
        return self.copies != "eager"


class Subject:
    """Layers in a store, and on the device what every arm shares."""

    def __init__(self, store: Store, decoder: Decoder) -> None:
        self.store, self.decoder, self.spec = store, decoder, decoder.spec
        (self.device,) = decoder.devices
        self.num_layers, self.layer_bytes = self.spec.config.num_layers, self.spec.layout.num_bytes
        self.head_bytes = sum(array.nbytes for array in decoder.head.values())

    def schedule(self, arm: Arm) -> Schedule:
        if arm.policy == "resident":
            return window(self.num_layers, None)
        return window(self.num_layers, arm.keep, arm.policy)

    def planned_bytes(self, arm: Arm) -> int:
        """Device memory at the peak, as a plan counts it."""
        return device_bytes(self.spec, self.schedule(arm), self.head_bytes).total_bytes

    def budget_bytes(self, share: int) -> int:
        """Device memory when layers may take `share` percent of the weights."""
        fixed = device_bytes(self.spec, self.schedule(Arm(policy="resident", keep=0)), self.head_bytes).fixed_bytes
        return fixed + share * self.num_layers * self.layer_bytes // 100

    def run(self, arm: Arm, tokens: int, *, check: bool) -> Run:
        """One generation, as `Decoder.run` has it, with the arm and its peak in its row."""
        transfer = DeviceTransfer(self.device) if arm.copies == "separate" else FusedTransfer(self.device)
        release = "free" if arm.copies == "eager" else "pool"
        controller = Controller(self.store, self.schedule(arm), transfer, release=release)
        with self._peak(arm, enabled=check) as peak:
            run = self.decoder.run([controller], tokens, check=check)
        row = {
            "arm": arm.name,
            **dataclasses.asdict(arm),
            "layer_bytes": self.layer_bytes,
            **run.row,
            "planned_bytes": self.planned_bytes(arm),
            "allocator_peak_bytes": peak(),
        }
        return dataclasses.replace(run, row=row)

    @contextlib.contextmanager
    def _peak(self, arm: Arm, *, enabled: bool) -> Iterator[Callable[[], int | None]]:
        """Yields what tells the device memory that was in use at the peak, after the block; None where nobody counts.

        The allocator's own peak is the process's and never falls: it is an arm's only if no arm before took more. That
        cannot be known of arms without a bound, so what they have in use is looked at all the time.
        """

        def stats() -> dict[str, int]:
            return self.device.memory_stats() or {}

        if arm.is_bounded or not enabled or "bytes_in_use" not in stats():
            yield lambda: stats().get("peak_bytes_in_use")
            return
        with HighestSeen(lambda: stats()["bytes_in_use"]) as seen:
            yield lambda: seen.value


def window_arms(num_layers: int, keeps: Iterable[str], both_sides: Iterable[str], ring: Iterable[str]) -> Iterator[Arm]:
    """Windows in layers; "off", and what holds every layer, is resident."""
    for text in keeps:
        keep = num_layers if text == "off" else int(text)
        yield Arm(policy="resident" if keep >= num_layers else "past", keep=min(keep, num_layers))
    for policy, texts in (("pinned_ring", ring), ("both_sides", both_sides)):
        yield from (Arm(policy=policy, keep=int(text)) for text in texts if int(text) < num_layers)


def share_arms(subject: Subject, shares: Iterable[str]) -> Iterator[Arm]:
    """For each budget in percent of the weights, the pinned ring and the largest past window that keep to it."""
    for share in map(int, shares):
        budget, num_layers = subject.budget_bytes(share), subject.num_layers
        fitting = share * num_layers // 100
        for policy, keep in (("pinned_ring", fitting), ("past", fitting // 2)):
            if 0 < keep < num_layers:
                yield Arm(policy=policy, keep=keep, share=share, budget_bytes=budget)


def budget_arms(subject: Subject, budgets: Iterable[str]) -> Iterator[Arm]:
    """The pinned ring within budgets for everything, such as 8GiB; "smallest" is the smallest that there can be."""
    num_layers, layer_bytes, fixed = subject.num_layers, subject.layer_bytes, subject.budget_bytes(0)
    for text in budgets:
        budget = fixed + layer_bytes if text == "smallest" else parse_bytes(text, name="device_budgets")
        schedule = window_within([layer_bytes] * num_layers, budget - fixed, kinds=[0] * num_layers)
        yield Arm(policy=schedule.name, keep=schedule.keep, budget_bytes=budget)


def transfer_arms(num_layers: int, copies: Iterable[str]) -> Iterator[Arm]:
    """Every layer streamed, two on the device, in each way to copy."""
    if num_layers > 2:
        yield from (Arm(policy="pinned_ring", keep=2, copies=way) for way in copies)


def freeing_arms(keeps: Iterable[str]) -> Iterator[Arm]:
    """Past windows under an allocator that really gives memory back: recycled all the same, and freed."""
    for keep in map(int, keeps):
        for copies in ("fused", "eager"):
            yield Arm(policy="past", keep=keep, copies=copies, allocator="platform")


def check_arms(subject: Subject, arms: Sequence[Arm], tokens: int) -> dict[Arm, Run]:
    """Each arm once: its bits, its counters and its peak.

    The allocator's peak only ever rises: with the smallest arm first, it is each arm's own right after that arm. Those
    whose memory is not bounded come last.
    """
    runs = {}
    with progress_bar("Checking bits and peaks", total=len(arms), unit="items") as advance:
        for arm in sorted(arms, key=lambda arm: (not arm.is_bounded, subject.planned_bytes(arm))):
            runs[arm] = subject.run(arm, tokens, check=True)
            advance(1)
    return {arm: runs[arm] for arm in arms}


def time_arms(subject: Subject, checked: dict[Arm, Run], tokens: int, orders: Iterable[Sequence[Arm]]) -> None:
    """Each arm once in each of `orders`; puts the times into the rows of `checked`."""
    orders = list(orders)
    times: dict[Arm, list[float]] = {arm: [] for arm in checked}
    with progress_bar("Timing", total=len(orders) * len(checked), unit="items") as advance:
        for arm in (arm for order in orders for arm in order):
            run = subject.run(arm, tokens, check=False)
            assert all(map(operator.eq, run.token_ids, checked[arm].token_ids)), arm  # as far as both go
            times[arm].append(run.row["ms_per_token"])
            advance(1)
    for arm, run in checked.items():
        run.row["ms_per_token"] = statistics.median(times[arm])
        run.row["ms_per_token_rounds"] = times[arm]
