"""Ctrl-C ends the installed command once and cleanly, wherever it comes.

Python's own KeyboardInterrupt does not: raised in a callback, such as JAX's of the garbage collector, it is printed and
lost; raised while an extension is imported, or while JAX starts a device, it comes out as another error, is lost, or
aborts the process; and an interpreter that is torn down while XLA still computes may crash.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

_AGAIN_S = 0.05  # from an interrupt that was lost, or came at a bad moment, to the next try
_DELICATE_FILES = ("<frozen importlib._bootstrap>", "jax/_src/xla_bridge.py")
_came = False


def install() -> None:
    """From now on an interrupt is remembered, besides raising KeyboardInterrupt. For a process of our own only."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _raise_later


def came() -> bool:
    """Whether there was an interrupt, whatever became of the exception."""
    return _came


def check() -> None:
    """Raises KeyboardInterrupt if there was an interrupt."""
    if _came:
        raise KeyboardInterrupt


def ignore() -> None:
    """From now on there is nothing left to interrupt."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave() -> NoReturn:
    """Says so and ends the process with 130, without tearing the interpreter down."""
    ignore()
    try:
        sys.stdout.flush()
        print("\ninterrupted", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # nobody reads it
    os._exit(130)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _came
    _came = True
    if _is_delicate(frame):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        raise KeyboardInterrupt


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether the main thread imports something, or JAX starts its devices."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_DELICATE_FILES):
            return True
        frame = frame.f_back
    return False


def _raise_later(unraisable: Any) -> None:
    """An exception has come where none can be raised: an interrupt is raised again, a moment later."""
    if unraisable.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(unraisable)
