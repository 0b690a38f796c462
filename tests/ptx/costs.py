"""Counts what the CUDA kernels issue in configurations A, B and C on each kind of GPU, and writes docs/results/costs.json.

    python tests/ptx/costs.py [--out FILE] [--only TEXT]

Tiles of the same branches, step and rows issue the same. The middle tile of each class runs, in a block of its own; its count,
less that of a block without a tile, is multiplied by the tiles of the class. One head runs for all, as heads keep equally many
rows. Some shorter launches also run whole, by few blocks that stay, as on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from ptx.emulator import Counts, Options
from ptx.launches.from_cuda import CudaOnPTX, PTXLauncher
from tqdm import tqdm

from dilkit.backends.cuda.compile import compiler_version
from dilkit.backends.cuda.table import CudaKernel
from dilkit.backends.tiles.backend import ROLES
from dilkit.backends.tiles.schedule import TILE
from dilkit.device import Capability, probe
from dilkit.problem import Problem
from dilkit.tools.bench.configuration import HEADS
from dilkit.tools.bench.suites.costs import CARDS, LAUNCHES, WHOLE
from dilkit.tools.bench.suites.gpu import CONFIGURATIONS
from dilkit.tools.results.file import new_result, write_result
from dilkit.tools.results.rows import ResultRow, RowsResult

COUNTED = Options(counted=True, checked=False)
HEAD_DIMS = 64, 128
TURNS = 16
"""Turns of a kernel without tiles, whose blocks are all alike: each has so many times the rows that it has at least."""
TENSORS = {"forward": (3, 1), "dots": (2, 0), "dquery": (4, 1), "dkeyvalue": (4, 2)}
"""Per role: tensors of rows of halves or floats that a launch reads, and that it writes, or adds to if it is not the first."""
NUMBERS = {"forward": 1, "dots": 1, "dquery": 2, "dkeyvalue": 2}
"""The same of floats, one a row: lse and delta."""


@dataclass(frozen=True)
class Counted:
    name: str
    tiles: int
    run: int
    rows: int
    is_first: bool
    counts: Counts


class AllTiles(PTXLauncher):
    """Runs every tile, by blocks that stay. `launched`: what all launches have issued."""

    def __init__(self, capability: Capability) -> None:
        super().__init__(capability, COUNTED)
        self.launched = list[Counted]()

    def launch(self, kernel: CudaKernel, blocks: int, arguments: Any, device: object = None) -> None:
        before = self.emulator.counts.get(kernel.name, Counts())
        super().launch(kernel, blocks, arguments)
        tiles = int(arguments["tile_count"]) or blocks
        self.launched.append(Counted(kernel.name, tiles, tiles, 0, True, self.emulator.counts[kernel.name] - before))


class FewTiles(AllTiles):
    """Runs a tile of each class, as a block of its own."""

    def resident(self, kernel: CudaKernel, device: object = None) -> int:
        return 2**30

    def at_least_resident(self, kernel: CudaKernel, device: object = None) -> int:
        return 1

    def launch(self, kernel: CudaKernel, blocks: int, arguments: Any, device: object = None) -> None:
        grid = blocks if arguments["tiles"] else max(1, blocks // TURNS)
        classes, rows, total = *classes_of(arguments, grid), Counts()
        idle = self.counted(kernel, grid, grid, arguments) if arguments["tiles"] else Counts()
        for members in classes:
            total += (self.counted(kernel, members[len(members) // 2], grid, arguments) - idle).times(len(members))
        self.launched.append(Counted(kernel.name, grid, len(classes), rows, bool(arguments["first"]), total))

    def counted(self, kernel: CudaKernel, number: int, grid: int, arguments: Any) -> Counts:
        """Count block `number` of a grid, which may have no tile."""
        before = self.emulator.counts.get(kernel.name, Counts())
        self.run(kernel, (number,), grid, arguments)
        return self.emulator.counts[kernel.name] - before


def classes_of(arguments: Any, blocks: int) -> tuple[list[np.ndarray], int]:
    """Return the tiles of each class (without tiles, its blocks), and the number of rows."""
    if not arguments["tiles"]:
        return [np.arange(blocks)], int(arguments["seq"] * arguments["heads"])
    memory = (ctypes.c_byte * (blocks * TILE.itemsize)).from_address(int(arguments["tiles"]))
    tiles = np.frombuffer(memory, TILE)
    _, number = np.unique(tiles[["set", "step", "rows"]], return_inverse=True)
    return [np.flatnonzero(number == one) for one in range(number.max() + 1)], int(tiles["rows"].sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/costs.json"))
    parser.add_argument("--only", default="", help="problems whose names hold this text")
    args = parser.parse_args()
    asked = [one for one in problems() if args.only in " ".join(map(str, one))]
    rows = [row for one in tqdm(asked, unit="problem") for row in costs(*one)]
    rows += [whole for one in WHOLES for whole in compared(*one)] if not args.only else []
    facts = dict(nvrtc=".".join(map(str, compiler_version())))
    write_result(new_result(RowsResult, probe("cpu"), kind="costs", facts=facts, rows=tuple(rows)), args.out)
    return 0


def problems() -> Iterator[tuple[str, int, str, Capability]]:
    """Configuration, head_dim, dtype, and the capability of a card: halves where there are tensor cores for them, float32 before
    8.0, from which on torch multiplies it on tensor cores."""
    for card, name, head_dim in product(CARDS, CONFIGURATIONS, HEAD_DIMS):
        if card.tensor:
            yield name, head_dim, "bfloat16" if card.capability >= (8, 0) else "float16", card.capability
        if card.capability < (8, 0):
            yield name, head_dim, "float32", card.capability


def costs(name: str, head_dim: int, dtype: str, capability: Capability) -> Iterator[ResultRow]:
    problem = CONFIGURATIONS[name]._replace(heads=1).problem(head_dim, dtype=dtype, requires_grad=True)
    seen: dict[str, int] = {}
    for role, one in launches(problem, FewTiles(capability)):
        number = seen[role] = seen.get(role, -1) + 1
        case = dict(configuration=name, head_dim=head_dim, dtype=dtype, architecture="sm_{}{}".format(*capability), role=role)
        values = dict(tiles=one.tiles * HEADS, run=one.run) | issued(one.counts.times(HEADS))
        values["memory"] = HEADS * memory_bytes(role, one, problem)
        yield ResultRow(table=LAUNCHES, case=case | dict(launch=number), who=one.name, values=values)


def issued(counts: Counts) -> dict[str, int]:
    least = counts.shared_least_wavefronts
    shared = dict(matrices=counts.matrix_wavefronts, shared=least, conflicts=counts.shared_wavefronts - least)
    alike = {name: getattr(counts, name) for name in ("shuffles", "barriers", "fma", "fp32", "special", "atomics", "copied")}
    products = counts.products_k16 + counts.products_k8 // 2
    return dict(products=products, loaded=counts.global_loaded, stored=counts.global_stored) | shared | alike


def memory_bytes(role: str, launch: Counted, problem: Problem) -> int:
    """Count a launch's bytes of tensors, each row once."""
    (given, results), numbers = TENSORS[role], NUMBERS[role]
    size = problem.head_dim * (4 if problem.dtype == "float32" else 2)
    return launch.rows * ((given + results * (1 if launch.is_first else 2)) * size + numbers * 4)


def launches(problem: Problem, launcher: AllTiles) -> Iterator[tuple[str, Counted]]:
    backend = CudaOnPTX(launcher)
    torch.manual_seed(0)
    shape, dtype = (1, problem.seq, problem.heads, problem.head_dim), getattr(torch, problem.dtype)
    query, key, value, dout = (torch.randn(shape, dtype=dtype) for _ in range(4))
    lse = torch.full((1, problem.heads, problem.seq), 9.0)
    tensors = dict(query=query, key=key, value=value, out=torch.empty_like(query), lse=lse, dout=dout)
    tensors |= dict(delta=torch.empty_like(lse), dquery=query.clone(), dkey=key.clone(), dvalue=value.clone())
    for role in ROLES:
        before = len(launcher.launched)
        backend.launch_role(role, tensors, problem)
        yield from ((role, one) for one in launcher.launched[before:])


WHOLES: tuple[tuple[str, int, int, str, Capability], ...] = (
    ("A", 32, 64, "bfloat16", (8, 0)),
    ("B", 4, 64, "bfloat16", (9, 0)),
    ("B", 16, 64, "float32", (6, 0)),
)
"""Configuration, what its lengths are divided by, and the rest of a problem that is run whole."""


def compared(name: str, divisor: int, head_dim: int, dtype: str, capability: Capability) -> Iterator[ResultRow]:
    sizes = dict(head_dim=head_dim, divisor=divisor, dtype=dtype, requires_grad=True)
    whole = CONFIGURATIONS[name].problem(**sizes)
    few = CONFIGURATIONS[name]._replace(heads=1).problem(**sizes)
    shown = f"{name} with lengths 1/{divisor}, {dtype}, head_dim {head_dim}, " + "sm_{}{}".format(*capability)
    both = launches(whole, AllTiles(capability)), launches(few, FewTiles(capability))
    for number, ((_, right), (_, found)) in enumerate(zip(*both, strict=True)):
        counts = asdict(right.counts), asdict(found.counts.times(HEADS))
        differ = {count: abs(counts[1][count] - counts[0][count]) / max(counts[0][count], 1) for count in counts[0]}
        del differ["atomics"]  # of the counter, which a launch of a block a tile has no use for
        count = max(differ, key=lambda name: differ[name])
        worst = dict(tiles=right.tiles, run=found.run, count=count, whole=counts[0][count], from_few=counts[1][count])
        yield ResultRow(table=WHOLE, case=dict(problem=shown, launch=number), who=right.name, values=worst)


if __name__ == "__main__":
    sys.exit(main())
