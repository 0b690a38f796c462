"""The order of exchanges in compiled code: that of the program, on every rank.

All ranks make the same exchanges in the same order. A compiler may move operators that do not depend on each other, as two layers
side by side, and where to depends on their sizes, which differ from rank to rank. So each operator is given a token of the one
before it in the same graph, `after`. torch's own means for that, effect tokens, fail within checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dilkit.op.schema import library

library.define("exchange_token(Tensor result) -> Tensor")
token_op: Callable[[Tensor], Tensor] = torch.ops.dilkit.exchange_token.default
"""An empty tensor that depends on a result. It is an operator because of checkpoints: what an operator of one gives the next is
saved. A mere result, or a view, is not, and so the first checkpoint would be computed again before the second."""

_LATEST: dict[str, WeakKeyDictionary[Any, Tensor]] = {"forward": WeakKeyDictionary(), "backward": WeakKeyDictionary()}
"""The token of the latest operator, by pass and by the graph being traced."""


def in_order(kernel: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """Wrap an operator's Autograd `kernel`, to pass it the token of the operator before as `after` while a graph is traced."""

    def call(*inputs: Any) -> Any:
        graph = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
        if graph is None:
            return kernel(*inputs)
        latest = _LATEST[phase]
        results = kernel(*inputs[:-1], latest.get(graph))
        latest[graph] = token_op(results if isinstance(results, Tensor) else results[-1])
        return results

    return call


def below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of `operator` for the Autograd key that records no gradient."""

    def call(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    return call


def _token(result: Tensor) -> Tensor:
    return result.new_empty(0)


library.impl("exchange_token", _token, "CompositeExplicitAutograd")
torch.library.register_fake("dilkit::exchange_token", _token, lib=library)
