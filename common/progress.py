"""How a long job shows that it moves: a bar with what is left to wait on a terminal, one line anywhere else."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLOW = 20_000_000  # bytes; less is done before one could wonder


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`, to be called with the bytes done since the last call, of `total` bytes. Writes to stderr."""
    if not sys.stderr.isatty():
        if total > SLOW:
            print(f"{title} ({total / 1e6:.0f} MB) …", file=sys.stderr, flush=True)
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda n: progress.advance(task, n)
