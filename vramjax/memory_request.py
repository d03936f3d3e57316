"""What a user asks of memory, in layers or in bytes, and for how many sequences.

Needs no JAX, so that it can be checked before anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from vramjax.config import MAX_SIZE, shown
from vramjax.decode.depth import MAX_DEPTH
from vramjax.errors import ConfigError
from vramjax.residency.budget import AUTO_RESERVE_BYTES
from vramjax.units import parse_bytes
from vramjax.whole_number import is_whole

if TYPE_CHECKING:
    from vramjax.residency.streaming import PolicyName

HostChoice = Literal["auto", "pinned", "mapped"]
Speculate = Literal["auto", "off"] | int


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What a user asks of memory.

    Invariant: of `keep` and `device_budget` exactly one is not None, "auto" if neither was given; sizes are numbers.

    Example: `MemoryRequest(device_budget="6GiB").device_budget` is 6442450944.
    """

    keep: int | None = None  # layers of the window
    policy: PolicyName = "pinned_ring"
    warm_up: bool | None = None  # upload before the first prompt what a sweep begins with; None: see `policy.window`
    device_budget: int | str | None = None  # bytes at the peak, everything counted; "auto": what is free
    host: HostChoice = "auto"  # where layers that are streamed wait
    host_budget: int | str | None = None  # bytes of the whole process, layers included; None: what is free
    batch: int = 1  # sequences that may be decoded at the same time
    batch_or_fewer: bool = False  # fewer where that is faster, or where memory has no room for so many
    speculate: Speculate = "auto"  # drafts of each sequence that a sweep has rows for; "auto": while there is room

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be used, and for two that exclude each other."""
        if self.keep is not None and self.device_budget is not None:
            raise ConfigError(
                f"keep is {self.keep!r} and device_budget is {self.device_budget!r}; expected one of the two: layers, "
                "or bytes of everything on the device"
            )
        if self.host not in get_args(HostChoice):
            raise ConfigError(f"host is {self.host!r}; expected one of {', '.join(get_args(HostChoice))}")
        if not is_whole(self.batch) or not 1 <= self.batch <= MAX_SIZE:
            raise ConfigError(f"batch is {self.batch!r}; expected a whole number, 1 .. {MAX_SIZE}")
        if self.speculate not in ("auto", "off") and not (
            is_whole(self.speculate) and 0 <= self.speculate <= MAX_DEPTH
        ):
            raise ConfigError(
                f"speculate is {shown(self.speculate)}; expected auto, off, or a number of drafts, 0 .. {MAX_DEPTH}"
            )
        for name in ("batch", "speculate"):
            if not isinstance(getattr(self, name), str):  # in no type of numpy's, whose products may overflow
                object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("device_budget", "host_budget"):
            size = getattr(self, name)
            if size is not None and (name, size) != ("device_budget", "auto"):
                object.__setattr__(self, name, parse_bytes(size, name=name))
        if self.keep is None and self.device_budget is None:
            object.__setattr__(self, "device_budget", "auto")

    def check_draft_model(self, draft_model: object) -> None:
        """Raises ConfigError if there is a model that drafts, and no drafts are wanted."""
        if draft_model is not None and self.speculate in ("off", 0):
            raise ConfigError(
                f"draft_model is given and speculate is {self.speculate!r}; expected drafts from it: leave one of the "
                "two out"
            )

    def device_budget_bytes(self, free_bytes: int) -> int | None:
        """The budget where `free_bytes` are free; None: layers count."""
        if self.device_budget == "auto":
            return max(0, free_bytes - AUTO_RESERVE_BYTES)
        assert not isinstance(self.device_budget, str)
        return self.device_budget

    @property
    def may_draft(self) -> bool:
        """Whether there may be drafts at all."""
        return self.speculate not in ("off", 0)

    @property
    def depth(self) -> int:
        """Drafts that each sequence must have rows for."""
        return 0 if isinstance(self.speculate, str) else int(self.speculate)

    @property
    def host_budget_bytes(self) -> int | None:
        assert not isinstance(self.host_budget, str)
        return self.host_budget
