"""NaN where nobody may look: in memory that is handed out, so that unwritten output is seen, and in sequences beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dilkit.testing.problems import Case


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block, `torch.empty` and its like hand out NaN, so that output left unwritten is seen."""

    def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            x = make(*args, **options)
            if x.is_floating_point():
                with torch.no_grad():  # torch's own code makes leaves so
                    x.fill_(float("nan"))
            return x

        return made

    makers = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"))
    with ExitStack() as patched:
        for owner, name in (*makers, (Tensor, "new_empty"), (Tensor, "new_empty_strided")):
            patched.enter_context(mock.patch.object(owner, name, poisoning(getattr(owner, name))))
        yield


def clean_rows(case: Case) -> Tensor:
    """Return a mask, bool `(total,)`, of the rows that are not poisoned; every other sequence is, the first one too."""
    clean = torch.ones(case.seq, dtype=torch.bool)
    if case.poisoned:
        whole = [(stop - length, stop) for stop, length in zip(accumulate(case.lengths), case.lengths, strict=True) if length]
        for start, stop in whole[::2] if len(whole) > 1 else ():
            clean[start:stop] = False
    return clean


def poisoned(case: Case, x: Tensor) -> Tensor:
    """Put NaN and inf into the rows `(1, total, heads, head_dim)` of a packed case that are not clean, in the same layout."""
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")]).to(x)
    rows = (~clean_rows(case)).nonzero().squeeze(-1).to(x.device)
    return x.index_copy(1, rows, bad[rows % 3][None, :, None, None].expand(1, -1, *x.shape[2:]))
