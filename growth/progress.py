"""The progress bar over bytes that growth, verification, import and export show on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def transfer_bar(total: int, what: str, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes with bytes per second; gives the function to call with the bytes that were done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
