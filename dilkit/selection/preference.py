"""An order of backends and why it is so: what one looks like, and on which problems a row of the table of orders bears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dilkit.device import Capability
from dilkit.problem import DTYPES, Problem

BY_DESIGN = "by design, until `dilkit tune` has measured"
MEASURED = "measured by `dilkit tune`"

LAUNCH_BOUND = 2**36
"""Nominal FLOPs of a forward pass, at most: about 0.1 ms of a GPU with fast matmuls, or ten launches to twenty."""

Range = tuple[Capability, Capability]
OLDEST: Capability = (0, 0)
NEWEST: Capability = (99, 9)


@dataclass(frozen=True)
class Preference:
    """Backends, best first, each with why it stands there. Those it does not name go by their `priority`."""

    places: tuple[tuple[str, str], ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        """The names, best first."""
        return tuple(name for name, _ in self.places)

    def why(self, name: str) -> str | None:
        """Why `name` stands where it does; None for a backend that is not named."""
        return dict(self.places).get(name)


@dataclass(frozen=True)
class PreferenceRow:
    """An order of backends, for problems of these dtypes on these devices that have all of `features` (see `FEATURES`).

    `capabilities`: ranges of compute capability, both ends included. `basis`: what `why` rests on.
    """

    device: str
    capabilities: tuple[Range, ...]
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    order: tuple[str, ...]
    why: str
    basis: str = BY_DESIGN

    def fits(self, problem: Problem) -> bool:
        """Whether this row is about `problem`."""
        device = problem.device
        if device.type != self.device or problem.dtype not in self.dtypes:
            return False
        if device.capability is not None and not any(low <= device.capability <= high for low, high in self.capabilities):
            return False
        return all(FEATURES[feature](problem) for feature in self.features)

    @property
    def where(self) -> str:
        """What the row is about, for people: "cuda 8.0-8.9, bfloat16 float16, shared keys"."""
        device = " ".join([self.device, " and ".join(filter(None, (_shown(*both) for both in self.capabilities)))]).strip()
        return ", ".join((device, "any dtype" if self.dtypes == DTYPES else " ".join(self.dtypes), *self.features))

    @property
    def preference(self) -> Preference:
        """The order with its reasons: of the first why it is first, of the others what would come first."""
        first, *others = self.order
        after = f"after {first}, which comes first {self.basis}: {self.why}"
        return Preference(((first, f"first {self.basis}: {self.why}"), *((name, after) for name in others)))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        lists = dict(dtypes=list(self.dtypes), features=list(self.features), order=list(self.order))
        return dict(device=self.device, where=self.where, **lists, why=self.why, basis=self.basis)


def measured_first(seconds: Sequence[tuple[str, float]], otherwise: Preference) -> Preference:
    """The backends that were measured, each with its seconds a call, best first; then those of `otherwise`."""
    if not seconds:
        return otherwise
    shown = ", ".join(f"{name} {1e3 * taken:.3g} ms" for name, taken in seconds)
    names = dict(seconds)
    places = [(name, f"{MEASURED}: {shown}") for name in names]
    rest = [(name, f"not among those {MEASURED}: {shown}") for name in otherwise.order if name not in names]
    return Preference((*places, *rest))


def _shares_keys(problem: Problem) -> bool:
    """Whether a head is served by several branches: their keys overlap, and a library computes them one by one."""
    branches = problem.pattern.branches
    if problem.pattern.heads is None:
        return len(branches) > 1
    return any(sum(branch.serves(head) for branch in branches) > 1 for head in range(problem.heads))


FEATURES: dict[str, Callable[[Problem], bool]] = {
    "shared keys": _shares_keys,
    "key padding mask": lambda problem: problem.key_padding_mask,
    "grouped heads": lambda problem: problem.kv_heads != problem.heads,
    "head_dim up to 64": lambda problem: problem.head_dim <= 64,
    "launch-bound": lambda problem: problem.flops() <= LAUNCH_BOUND,
}
"""What a row may ask of a problem beside its device and dtype."""


def _shown(low: Capability, high: Capability) -> str:
    first, last = (f"{major}.{minor}" for major, minor in (low, high))
    if low == high:
        return first
    if low == OLDEST:
        return "" if high == NEWEST else f"up to {last}"
    return f"{first} and newer" if high == NEWEST else f"{first}-{last}"
