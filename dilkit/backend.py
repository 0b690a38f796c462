"""What a backend is: limits as data, a forward and a backward."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from dilkit.device import Capability
from dilkit.pattern import OFFSETS, OVERLAPS
from dilkit.problem import DTYPES, Problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Refusal:
    """Why a backend cannot compute a problem: what was asked for, what the limit is, and a way out."""

    code: str
    value: str
    limit: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.code} {self.value}: {self.limit}{hint}"


@dataclass(frozen=True)
class Limits:
    """What a backend can compute, as data. None in a set's place means no limit."""

    devices: frozenset[str] | None = frozenset({"cpu"})
    dtypes: frozenset[str] = frozenset(DTYPES)
    min_capability: Capability | None = None
    max_capability: Capability | None = None
    device_features: frozenset[str] = frozenset()
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    causal: bool = True
    key_padding_mask: bool = True
    gradients: bool = True
    grouped_heads: bool = True
    head_ranges: bool = True
    branch_kinds: frozenset[str] = frozenset({"dilated_segment"})
    offsets: frozenset[str] = frozenset(OFFSETS)
    overlaps: frozenset[str] = frozenset(OVERLAPS)

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        """Every limit that `problem` exceeds, none left out."""
        return (*self._device_refusals(problem), *self._size_refusals(problem), *self._feature_refusals(problem))

    def _device_refusals(self, problem: Problem) -> list[Refusal]:
        device, found = problem.device, []
        if self.devices is not None and device.type not in self.devices:
            return [Refusal("device", device.type, f"runs on {_listed(self.devices)}")]
        if device.torch_code is False:
            found.append(
                Refusal("torch", str(device), "the installed torch has no code for this GPU", torch_hint(device.capability))
            )
        if device.capability is not None:
            low, high = self.min_capability, self.max_capability
            shown = f"{device.capability[0]}.{device.capability[1]}"
            if low is not None and device.capability < low:
                found.append(Refusal("capability", shown, f"at least {low[0]}.{low[1]} is needed"))
            if high is not None and device.capability > high:
                found.append(Refusal("capability", shown, f"at most {high[0]}.{high[1]} is supported"))
        if missing := self.device_features - device.features:
            found.append(Refusal("device features", _listed(device.features) or "none", f"{_listed(missing)} needed"))
        return found

    def _size_refusals(self, problem: Problem) -> list[Refusal]:
        found = []
        if problem.dtype not in self.dtypes:
            found.append(Refusal("dtype", problem.dtype, f"computes {_listed(self.dtypes)}"))
        if self.max_head_dim is not None and problem.head_dim > self.max_head_dim:
            found.append(Refusal("head_dim", str(problem.head_dim), f"at most {self.max_head_dim}"))
        if problem.head_dim % self.head_dim_multiple:
            found.append(Refusal("head_dim", str(problem.head_dim), f"a multiple of {self.head_dim_multiple} is needed"))
        return found

    def _feature_refusals(self, problem: Problem) -> list[Refusal]:
        pattern, found = problem.pattern, []
        asked = {
            "is_causal": (problem.is_causal, self.causal),
            "key_padding_mask": (problem.key_padding_mask, self.key_padding_mask),
            "requires_grad": (problem.requires_grad, self.gradients),
            "grouped heads": (problem.kv_heads != problem.heads, self.grouped_heads),
            "head ranges": (pattern.heads is not None, self.head_ranges),
        }
        for code, (wanted, can) in asked.items():
            if wanted and not can:
                found.append(Refusal(code, "yes", "not supported"))
        chosen = {"offset": (pattern.offset, self.offsets), "overlap": (pattern.overlap, self.overlaps)}
        for code, (value, known) in chosen.items():
            if value not in known:
                found.append(Refusal(code, repr(value), f"supports {_listed(known)}"))
        if unknown := {branch.kind for branch in pattern.branches} - self.branch_kinds:
            found.append(Refusal("branch kind", _listed(unknown), f"supports {_listed(self.branch_kinds)}"))
        return found


class Backend(ABC):
    """Somebody who can compute dilated attention.

    A subclass states `name`, `limits` and `priority` (the automatic choice takes the highest that can; a table shares out those
    of dilkit's own backends, 0 to 20, by what suits the device), lists in `requires` the modules it imports inside its work
    (`extra`: the extra of dilkit that brings them), and computes `forward` and, unless its limits say otherwise, `backward`.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    limits: ClassVar[Limits] = Limits()
    priority: ClassVar[int] = 0
    reproducible: ClassVar[bool] = False
    """Whether equal inputs give equal bits, run after run: `dilkit verify --repeats` holds it to that."""

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        """Every reason why this backend cannot compute `problem`; empty when it can."""
        return (*missing_modules(self.requires, self.extra), *self.limits.refusals(problem))

    def detail(self, problem: Problem) -> str:
        """What exactly would run for a problem that is not refused, and why; empty when there is nothing to choose."""
        return ""

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)`: `out` contiguous, shaped and typed like `query`; `lse` `(batch, heads, seq)`, fp32 (fp64 for fp64).

        The tensors are checked already: last dimension contiguous, any other strides, none empty; the mask bool
        `(batch, seq)`, True = ignored, any strides. A row that sees no key has `out = 0`, `lse = -inf`.
        """

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dquery, dkey, dvalue)`, exact given the `out` and `lse` of the whole softmax: `P = exp(s - lse)`.

        `dout` has a contiguous last dimension. Rows with `lse = -inf` have zero gradient.
        """
        raise NotImplementedError(f"backend {self.name!r} states gradients in its limits but has no backward")


def missing_modules(modules: tuple[str, ...], extra: str = "") -> tuple[Refusal, ...]:
    """A refusal for each module that is not installed; nothing is imported to find out. `extra` of dilkit brings them all."""
    hint = f"pip install 'dilkit[{extra}]'" if extra else ""
    return tuple(
        Refusal("module", name, "not installed", hint or f"pip install {name}") for name in modules if not _installed(name)
    )


@lru_cache(maxsize=256)
def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def torch_hint(capability: Capability | None) -> str:
    """Which torch to install for a GPU that the installed one has no code for."""
    if capability is not None and capability < (7, 5):
        return "install a torch built for CUDA 12.6, the last line with code for Maxwell, Pascal and Volta"
    return "install a torch built for CUDA 12.8 or newer"


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names))
