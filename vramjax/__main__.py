"""`python -m vramjax`, the installed command and the scripts: the command line as a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from vramjax import interrupt


def run(argv: Sequence[str] | None = None) -> None:
    """Runs `vramjax.cli.main`; an interrupt ends the process with 130 and one line."""
    try:
        interrupt.install()
        _open_closed_streams()
        try:
            from vramjax.cli import main  # here, as an import too can be interrupted

            main(argv)
            interrupt.check()
        finally:
            if not interrupt.came():
                interrupt.ignore()
    except BaseException:
        if interrupt.came():
            interrupt.leave()
        raise


def _open_closed_streams() -> None:
    """What was started with stdout or stderr closed prints into nothing, not into the next file that is opened."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


if __name__ == "__main__":
    run()
