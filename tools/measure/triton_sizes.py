"""Sizes of the kernels in Triton to try beside those of its table."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

from dilkit import environment, registry
from dilkit.backends.tiles.device import tall_tiles
from dilkit.backends.tiles.schedule import LOW_ROWS
from dilkit.backends.triton.launch import DeviceLauncher
from dilkit.backends.triton.sizes import Sizes, hip_sizes, padded
from dilkit.problem import DTYPE_BYTES, Problem
from dilkit.tools.bench.suites.kernels import SHARED_KIB

HALVES = [*product((5, 3, 2), (64, 32, 128, 16), ((128, 8), (64, 4), (64, 8), (128, 4)))]
SINGLES = [*product((1, 2), (32, 16), ((32, 8), (16, 8), (16, 4)))]
"""Stages, columns, rows and warps: copies that run ahead first."""
OF_ROW = {"forward": (1, 1), "dquery": (2, 1), "dkeyvalue": (2, 2)}
"""Tensors of a tile's rows that stay for the whole loop, and sums of the same size."""
REGISTERS = 130
"""Registers of a thread for tiles and sums: of 255, without those for addresses, bounds and softmax."""


class Chosen(DeviceLauncher):
    """Launches the kernel of `role` with `chosen` sizes, also where tiles are not tall."""

    def __init__(self, role: str, chosen: Sizes) -> None:
        super().__init__()
        self.role, self.chosen = role, chosen

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        return self.chosen if role == self.role else super().sizes(role, problem, low)


def candidates(role: str, problem: Problem) -> list[Sizes]:
    """Return the table's sizes, then others: those first that are counted to fit, as they are listed."""
    table = [DeviceLauncher().sizes(role, problem, low) for low in (False, True)]
    tiles = SINGLES if problem.dtype == "float32" else HALVES
    listed = [Sizes(rows, columns, warps, stages) for stages, columns, (rows, warps) in tiles]
    listed = [*map(hip_sizes, listed)] if problem.device.platform == "hip" else listed
    own, *others = (x for x in (*table, *listed) if x.rows <= LOW_ROWS or tall_tiles(problem, x.rows))
    return [*dict.fromkeys((own, *sorted(others, key=lambda x: not fits(role, x, problem))))]


def fits(role: str, sizes: Sizes, problem: Problem) -> bool:
    """True if a block is counted to fit in shared memory, and a thread's tiles in registers. Compilers may count otherwise."""
    number, size, capability = DTYPE_BYTES[problem.dtype], padded(problem.head_dim), problem.device.capability
    (kept, sums), by_warpgroup = OF_ROW[role], capability in ((9, 0), (10, 0)) and sizes.rows >= 64
    room = 64 if capability is None else SHARED_KIB.get("sm_{}{}".format(*capability), 99)
    copied = 2 * sizes.columns * ((sizes.stages + 1) // 2) + kept * sizes.rows * by_warpgroup
    scores = (1.5 if role == "forward" else 3) * sizes.columns
    of_row = sums * size + scores + kept * size * number / 4 * (not by_warpgroup)
    return number * size * copied <= room * 1024 and sizes.rows * of_row <= REGISTERS * 32 * sizes.warps


def shown(sizes: Sizes) -> str:
    """Return the text that the file of `dilkit tune` has for these sizes."""
    return f"{sizes.rows} x {sizes.columns}, {sizes.warps} warps, {sizes.stages} stages"


@contextmanager
def registered(role: str, problem: Problem, others: int) -> Iterator[dict[str, str]]:
    """Within the block, the table's sizes and as many others are backends: yield the text of their sizes by name.

    They need no proof: their results are being checked.
    """
    with ExitStack() as stack:
        names = dict[str, str]()
        for one in candidates(role, problem)[: 1 + others]:
            backend: Any = copy.copy(registry.backends()["triton"])
            backend.name, backend.launcher = f"triton: {role} {shown(one)}".replace(",", ""), Chosen(role, one)
            registry.register_backend(backend)
            stack.callback(registry.unregister_backend, backend.name)
            names[backend.name] = shown(one)
        stack.enter_context(environment.without_proofs())
        yield names
