"""Progress of long work on standard error: a bar on a terminal, else a line every half minute; nothing without one (pythonw)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tqdm import tqdm

FIRST, BETWEEN = 10.0, 30.0
"""Seconds before the first line, and between two lines, where there is no terminal."""


def progress(items: Iterable[Any] | None = None, **options: Any) -> tqdm[Any]:
    """Return tqdm's bar over `items`. `options` are tqdm's, such as `unit` and `total`."""
    if sys.stderr is None:
        options["disable"] = True
    elif not sys.stderr.isatty():
        options |= dict(file=_Lines(), delay=FIRST, mininterval=BETWEEN, maxinterval=BETWEEN, ncols=100)
    return tqdm(items, leave=False, **options)


@contextlib.contextmanager
def shown(unit: str, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """Yield a function of the number done, the total and a loss, which moves the bar; nothing if `hidden`."""
    with progress(unit=unit, disable=hidden) as bar:

        def show(done: int, total: int, loss: float | None = None) -> None:
            bar.total = total
            bar.set_postfix({} if loss is None else {"loss": f"{loss:.4f}"}, refresh=False)
            bar.update(done - bar.n)

        yield show


class _Lines:
    """Standard error as tqdm's file: each state of a bar becomes a line."""

    def write(self, text: str) -> None:
        if state := text.strip():
            with contextlib.suppress(OSError):  # nobody reads any more, for which no work is given up
                print(state, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass
