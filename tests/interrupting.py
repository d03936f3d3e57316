"""KeyboardInterrupt at every step of a call, one after the other, at which Python looks for signals.

Python looks for them as a function begins, when a function written in C has returned, and as a loop begins anew.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

Place = tuple[CodeType, int]  # of a step: the offset of an instruction


class _Follower:
    """Follows the calls of this thread in files in whose paths one of the names is; once, what is reached at a place is
    interrupted.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.places: dict[Place, None] = {}  # that were reached, in this order
        self.at: Place | None = None

    def __enter__(self) -> _Follower:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 shows opcodes if any frame asked before `settrace`
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not any(name in frame.f_code.co_filename for name in self._names):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._reach(frame)
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "opcode" and frame.f_lasti in _steps(frame.f_code):
            self._reach(frame)
        return self._step

    def _reach(self, frame: FrameType) -> None:
        place = frame.f_code, frame.f_lasti
        self.places[place] = None
        if place == self.at:
            self.at = None
            sys.settrace(None)
            raise KeyboardInterrupt


def places_of(function: Callable[[], object], *names: str) -> list[Place]:
    """The steps of a call, each once, in files in whose paths one of the names is. Makes it twice."""
    with _Follower(names) as steps:
        function()  # Python shows the steps of a function from the second time on
        function()
    return list(steps.places)


def interrupt(function: Callable[[], object], place: Place, *names: str) -> bool:
    """Makes a call twice and interrupts the second one; returns whether it got to the place. `names` as before."""
    with _Follower(names) as steps:
        function()
        steps.at = place
        with contextlib.suppress(KeyboardInterrupt):
            function()
        return steps.at is None


def described(place: Place) -> str:
    code, offset = place
    lines = [line for start, end, line in code.co_lines() if start <= offset < end]
    return f"{code.co_filename}:{lines} {code.co_qualname} at {offset}"


@functools.cache
def _steps(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which signals are looked for, besides the beginning."""
    handlers = {}
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        handlers |= dict.fromkeys(range(entry.start, entry.end, 2), entry.target)
    steps: set[int] = set()
    before = None
    for instruction in dis.get_instructions(code):
        offset = instruction.offset
        if instruction.opname == "JUMP_BACKWARD":
            steps.add(offset)
        # What is raised in a call comes from there. Seen one instruction later it must find the same handler.
        if (
            before is not None
            and before.opname.startswith("CALL")
            and handlers.get(before.offset) == handlers.get(offset)
        ):
            steps.add(offset)
        before = instruction
    return frozenset(steps)
