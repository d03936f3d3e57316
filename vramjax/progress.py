"""What is said on stderr while something is done: notes, and bars for whatever takes more than a second or two."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column


def print_notes(notes: Iterable[str], *, enabled: bool = True) -> None:
    """Prints what a user may want to know, and need not act on, one note a line."""
    if enabled:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)


@contextmanager
def progress_bar(
    description: str, *, total: int, unit: Literal["bytes", "items"] = "bytes", enabled: bool = True
) -> Iterator[Callable[[int], None]]:
    """Shows a bar while the block runs and yields `advance(n)`, which moves it by `n` bytes or items.

    On a terminal the bar redraws itself and vanishes at the end; elsewhere (a log file, CI) nothing is drawn.
    """
    if not enabled:
        yield lambda n: None
        return
    columns = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    with Progress(
        # Narrow enough for all columns to fit on a line of 80 characters.
        TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", max_width=26)
        ),
        BarColumn(bar_width=16),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(description, total=total)
        yield lambda n: progress.advance(task, n)
