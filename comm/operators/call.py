"""The arguments of attention over ranks beside tensors and numbers, as its operators take them: one line of text."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from dilkit.comm.arguments import Arguments
from dilkit.comm.transports.base import Comm
from dilkit.comm.transports.handles import transport_of
from dilkit.pattern import Pattern

_FORMAT = "2"
"""The beginning of every call: change it with `encode` and with what autograd does, because torch.compile keeps whole graphs on
disk and finds them again by such constants."""
_LITERALS = (bool, int, float, str)


class Call(NamedTuple):
    """The arguments, as they were given; `recorded`: whether a backward pass may follow, `asked`: for which inputs."""

    version: str
    handle: str
    recorded: bool
    asked: str
    pattern: str
    is_causal: bool
    backend: str | Sequence[str] | None
    schedule: str
    fuse_branches: bool
    return_lse: bool
    keep: str

    @property
    def comm(self) -> Comm:
        """The transport. Raises RuntimeError if it is gone."""
        return transport_of(self.handle)

    def arguments(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sink: Tensor | None,
        scale: float | None,
        dropout_p: float,
        seed: Tensor | None = None,
    ) -> Arguments:
        """The arguments of the call with these tensors and numbers."""
        return Arguments(
            query,
            key,
            value,
            Pattern.from_json(self.pattern),
            self.is_causal,
            mask,
            sink,
            scale,
            dropout_p,
            self.backend,
            self.schedule,
            self.fuse_branches,
            None,
            self.return_lse,
            self.recorded,
            seed,
            keep=self.keep,
            asked=self.asked,
        )


def can_be_encoded(given: Arguments) -> bool:
    """Whether the options can be written down, right or wrong. Wrong ones are refused when the operator runs, on all ranks."""
    names = given.backend if isinstance(given.backend, (list, tuple)) else (given.backend,)
    options = given.is_causal, given.schedule, given.fuse_branches, given.return_lse, given.keep, *names
    return all(x is None or type(x) in _LITERALS for x in options)


def encode(given: Arguments, comm: Comm) -> str:
    """The call as text. This is traced, so that code is compiled again where an option changes."""
    names = tuple(given.backend) if isinstance(given.backend, (list, tuple)) else given.backend
    options = given.is_causal, names, given.schedule, given.fuse_branches, given.return_lse, given.keep
    return f"{(_FORMAT, comm.handle, given.requires_grad, given.gradients, given.pattern.to_json(), *options)!r}"


@lru_cache(maxsize=256)
def decode(text: str) -> Call:
    """The call that `encode` wrote. Raises ValueError for any other text."""
    try:
        return Call(*ast.literal_eval(text))
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"call={text!r} is not what dilkit writes: {error}") from None
