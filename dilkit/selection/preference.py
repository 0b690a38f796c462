"""A preference: an order of backends with reasons. A row of the preference table: the problems that a preference applies to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dilkit.device import Capability
from dilkit.pattern.lowering import Band, Runs, Segments
from dilkit.problem import DTYPES, Problem

BY_DESIGN = "by design, until `dilkit tune` has measured"
COUNTED = "as counted in docs/gpu-costs.md, which are bounds, until `dilkit tune` has measured"
ON_H200 = "as measured on an NVIDIA H200 (docs/results/gpu.md), until `dilkit tune` has measured"
MEASURED = "measured by `dilkit tune`"

LAUNCH_BOUND = {"float32": 2**36, "bfloat16": 2**37, "float16": 2**37}
"""The most nominal FLOPs of a launch-bound forward pass, by dtype. On an H200 in bf16, with three quarters of them, `cupy_raw`
took 0.3 to 0.4 ms, in one launch, and torch's kernels 0.8 to 2.2 ms, most of it between launches. In float32, with half as many
again, both took as long."""

Range = tuple[Capability, Capability]
OLDEST: Capability = (0, 0)
NEWEST: Capability = (99, 9)


@dataclass(frozen=True)
class Preference:
    """Backends, best first, each with the reason for its place. Backends that are not named are ordered by their `priority`."""

    places: tuple[tuple[str, str], ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        """The names, best first."""
        return tuple(name for name, _ in self.places)

    def why(self, name: str) -> str | None:
        """Return the reason for the place of `name`; None for a backend that is not named."""
        return dict(self.places).get(name)


@dataclass(frozen=True)
class PreferenceRow:
    """An order of backends, for problems of these dtypes on these devices that have all of `features` (see `FEATURES`).

    `capabilities`: ranges of compute capability, both ends included. `basis`: the evidence for `why`.
    """

    device: str
    capabilities: tuple[Range, ...]
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    order: tuple[str, ...]
    why: str
    basis: str = BY_DESIGN

    def fits(self, problem: Problem) -> bool:
        """True if this row applies to `problem`."""
        device = problem.device
        if device.type != self.device or problem.dtype not in self.dtypes:
            return False
        if device.capability is not None and not any(low <= device.capability <= high for low, high in self.capabilities):
            return False
        return all(FEATURES[feature](problem) for feature in self.features)

    @property
    def where(self) -> str:
        """The problems that the row applies to, for people: "cuda 8.0-8.9, bfloat16 float16, shared keys"."""
        device = " ".join([self.device, " and ".join(filter(None, (_shown(*both) for both in self.capabilities)))]).strip()
        return ", ".join((device, "any dtype" if self.dtypes == DTYPES else " ".join(self.dtypes), *self.features))

    @property
    def preference(self) -> Preference:
        """The order with its reasons: why the first backend is first, and for the others which backend comes before them."""
        first, *others = self.order
        after = f"after {first}, which comes first {self.basis}: {self.why}"
        return Preference(((first, f"first {self.basis}: {self.why}"), *((name, after) for name in others)))

    def to_dict(self) -> dict[str, Any]:
        """Convert the row to plain data, for JSON."""
        lists = dict(dtypes=list(self.dtypes), features=list(self.features), order=list(self.order))
        return dict(device=self.device, where=self.where, **lists, why=self.why, basis=self.basis)


def measured_first(seconds: Sequence[tuple[str, float]], otherwise: Preference) -> Preference:
    """Order the measured backends by their seconds a call, followed by those of `otherwise`."""
    if not seconds:
        return otherwise
    shown = ", ".join(f"{name} {1e3 * taken:.3g} ms" for name, taken in seconds)
    names = dict(seconds)
    places = [(name, f"{MEASURED}: {shown}") for name in names]
    rest = [(name, f"not among those {MEASURED}: {shown}") for name in otherwise.order if name not in names]
    return Preference((*places, *rest))


def _shares_keys(problem: Problem) -> bool:
    """True if several branches serve a head: their keys overlap, and a library computes the branches one by one."""
    branches = problem.pattern.branches
    if problem.pattern.heads is None:
        return len(branches) > 1
    return any(sum(branch.serves(head) for branch in branches) > 1 for head in range(problem.heads))


FEATURES: dict[str, Callable[[Problem], bool]] = {
    "shared keys": _shares_keys,
    "key padding mask": lambda problem: problem.key_padding_mask,
    "training": lambda problem: problem.requires_grad,
    "nothing dilated": lambda problem: all(form.rate == 1 for form in problem.forms if isinstance(form, (Segments, Band))),
    "runs": lambda problem: Runs.name in problem.forms.names,
    "stored rows": lambda problem: bool(problem.stored),
    "launch-bound": lambda problem: problem.flops() <= LAUNCH_BOUND.get(problem.dtype, 0),
    "no gradients": lambda problem: not problem.requires_grad,
    "head_dim up to 64": lambda problem: problem.head_dim <= 64,
}
"""The features of a problem that a row may require beside its device and dtype."""


def _shown(low: Capability, high: Capability) -> str:
    first, last = (f"{major}.{minor}" for major, minor in (low, high))
    if low == high:
        return first
    if low == OLDEST:
        return "" if high == NEWEST else f"up to {last}"
    return f"{first} and newer" if high == NEWEST else f"{first}-{last}"
