"""Memory that is handed out full of NaN, so that output left unwritten is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    with (
        mock.patch.object(torch, "empty", poisoning(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoning(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", poisoning(torch.empty_strided)),
        mock.patch.object(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty)),
        mock.patch.object(torch.Tensor, "new_empty_strided", poisoning(torch.Tensor.new_empty_strided)),
    ):
        yield
