"""Runs the kernels in Triton under ttsem, which computes Triton's own IR on the CPU and stops at what a GPU would not show.

    python tests/backends/triton/sanitize.py [--capability 9.0]

It finds accesses beyond a launch's tensors, two programs that race, and undefined results. Cases are held to the oracle too.
First come kernels that are launched wrongly on purpose, which ttsem must find. Exit code 1 if anything is wrong.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, f"{sys.prefix}/ttsem")  # where its stage lies, with a Triton of its own
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from cases import TOGETHER
from helpers.emulated import passes

from dilkit import Pattern, register_backend
from dilkit.backends.triton.backend import TritonTiles
from dilkit.backends.triton.launch import compiling, kernel
from dilkit.backends.triton.sizes import Sizes, sizes_for
from dilkit.backends.triton.tiles import TableView
from dilkit.problem import Problem
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

try:
    from ttsem import sanitize
except ImportError:
    sys.exit("ttsem is not installed: make triton-sanitize")

ROW_FIELDS = 4
"""Fields of a tile: its first row, how many, their step, and their head."""
DTYPES = ("float32", "float16", "bfloat16")
ON_GPUS = {"float16": 63, "bfloat16": 64, "float32": 32}
"""Dtypes with a head_dim, for cases that have the sizes of tiles that GPUs have."""


class SanitizedLauncher:
    """Launches that ttsem computes. `as_on_gpus`: with the tiles that GPUs have, else with small ones."""

    def __init__(self, as_on_gpus: bool):
        self.as_on_gpus = as_on_gpus

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        return sizes_for(role, problem.dtype, problem.head_dim, (8, 0), low) if self.as_on_gpus else Sizes(16, 16, 4, 1)

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]):
        kernel(role)[(programs,)](*arguments, **constants, **compiling(sizes))


class OneProgramMore(SanitizedLauncher):
    """A fault: the last program has no tile."""

    def launch(self, role: str, sizes: Sizes, programs: int, *given):
        super().launch(role, sizes, programs + 1, *given)


class SameRows(SanitizedLauncher):
    """A fault: the second tile has the first one's rows, so that two programs write them."""

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]):
        super().launch(role, sizes, programs, tuple(map(self._faulty, arguments)), constants)

    def _faulty(self, argument):
        if not isinstance(argument, TableView):
            return argument
        tiles = argument.tiles.clone()
        tiles[1, :ROW_FIELDS] = tiles[0, :ROW_FIELDS]
        return argument._replace(tiles=tiles)


class Sanitized(TritonTiles):
    limits = replace(TritonTiles.limits, devices=frozenset({"cpu"}), min_capability=None)

    def __init__(self, name: str, launcher: SanitizedLauncher):
        super().__init__(launcher)
        self.name = name


FAULTS = {
    "one program more": (OneProgramMore(as_on_gpus=False), "past the end of the tensor"),
    "the same rows": (SameRows(as_on_gpus=False), "both touch"),
}
SMALL, LARGE = "triton_sanitized", "triton_sanitized_as_on_gpus"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", default="9.0", help="the GPU that kernels are compiled for")
    capability = int(parser.parse_args().capability.replace(".", ""))
    register_backend(Sanitized(SMALL, SanitizedLauncher(as_on_gpus=False)))
    register_backend(Sanitized(LARGE, SanitizedLauncher(as_on_gpus=True)))
    with sanitize.session(cc=capability, cuda_is_cpu=False):
        missed = [name for name in FAULTS if not finds(name)]
    with sanitize.session(cc=capability, cuda_is_cpu=False) as session:
        failed = [case.name for backend, case in cases() if not passes(backend, case)]
    print(f"{session.launches} launches, of which {session.races_unchecked} were too large to be checked for races")
    print(f"faults on purpose that were not found: {missed}; cases that failed: {failed}" if missed or failed else "all passed")
    return bool(missed or failed or session.races_unchecked or not session.launches)


def cases() -> Iterator[tuple[str, Case]]:
    """A backend and what it computes: several branches, kinds, softcaps and biases, in all dtypes."""
    for i, (variant, fields) in enumerate(TOGETHER.items()):
        yield SMALL, Case(feature="branches together", variant=variant, batch=1, dtype=DTYPES[i % 3], **fields)
    for dtype, head_dim in ON_GPUS.items():
        fields = dict(seq=150, heads=1, batch=1, is_causal=dtype != "float32")
        yield (
            LARGE,
            Case(feature="sizes", variant=dtype, pattern=Pattern([128, 256], [1, 2]), head_dim=head_dim, dtype=dtype, **fields),
        )


def finds(name: str) -> bool:
    launcher, message = FAULTS[name]
    register_backend(Sanitized(f"triton {name}", launcher))
    case = Case(feature="fault", variant=name, batch=1, dtype="float32", **TOGETHER["nested causal"])
    reasons = "; ".join(check(f"triton {name}", case).reasons)
    print(f"{name}: {reasons or 'nothing'}", flush=True)
    return "KernelFault" in reasons and message in reasons


if __name__ == "__main__":
    sys.exit(main())
