"""Memory that is handed out full of NaN, so that output left unwritten is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


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
