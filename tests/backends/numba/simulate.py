"""Runs the kernels in numba.cuda on the CPU, in numba's simulator, over cases of the problem list.

    python tests/backends/numba/simulate.py [--share I/N] [--all] [--keys]

By default the smallest case of each feature, made smaller still. Tiles of the sizes that GPUs have run on the emulator of
`tests/ptx`. Exit code 1 if one fails. A process of its own chooses the simulator before it imports numba.
"""

import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
warnings.simplefilter("error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from helpers import huge_scores  # noqa: E402
from helpers.emulated import FEW_ROWS, parser_of_shares, passes, smallest  # noqa: E402
from numba.cuda.simulator import kernel, kernelapi  # noqa: E402
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray  # noqa: E402

from dilkit import Pattern, register_backend  # noqa: E402
from dilkit.backends.numba.arguments import Tiling  # noqa: E402
from dilkit.backends.numba.backend import NumbaCuda, NumbaLauncher, compiled  # noqa: E402
from dilkit.backends.numba.visible import MAX_RUNS, VisibleRuns, list_visible, visible_position  # noqa: E402
from dilkit.backends.tiles.schedule import MAX_BRANCHES, schedule  # noqa: E402
from dilkit.problem import Problem  # noqa: E402
from dilkit.testing.problems import PROBLEMS, Case  # noqa: E402

SHORT_WAIT = 1e-4

SIZES = dict(feature="branches together", head_dim=8, batch=1)
TOGETHER = (
    Case(variant="nested", pattern=Pattern([24, 48], [1, 2]), seq=48, heads=2, **SIZES),
    Case(variant="met again causal", pattern=Pattern([32, 40], [2, 1]), seq=40, heads=1, is_causal=True, **SIZES),
)
"""Branches of one group: those of the list have segments too short for the rows of a tile."""

LISTED = (
    Pattern([6, 12, 24], [1, 2, 3], heads=[(0, 3), None, (1, 4)]),
    Pattern([6, 12, 24], [1, 2, 3], overlap="once"),
    Pattern([24, 24, 24], [4, 2, 3]),
)


class SimulatorLauncher(NumbaLauncher):
    """Small tiles for the simulator: eight threads, and several tiles even in short sequences."""

    def tiling(self, role: str, head_dim: int) -> Tiling:
        return Tiling(head_dim=-(-head_dim // 8) * 8, rows=8, columns=4, down=4, across=2)

    def launch(self, role: str, dtype: str, tiling: Tiling, blocks: int, arguments: tuple[Any, ...]):
        given = (FakeCUDAArray(x) if isinstance(x, np.ndarray) else x for x in map(as_arrays, arguments))
        compiled(role, dtype, tiling, None)[blocks, (tiling.across, tiling.down)](*given)


def as_arrays(x):
    """`x` with its tensors, on whatever level, as numpy's arrays of the same memory."""
    if isinstance(x, torch.Tensor):
        return x.detach().numpy()
    return type(x)(*map(as_arrays, x)) if isinstance(x, tuple) else x


class Simulated(NumbaCuda):
    name = "numba_simulated"
    limits = replace(NumbaCuda.limits, devices=frozenset({"cpu"}), min_capability=None)


def main() -> int:
    parser = parser_of_shares(__doc__, "an hour")
    parser.add_argument("--keys", action="store_true", help="compare the keys that tiles list with the count, and run no kernel")
    args = parser.parse_args()
    if args.keys:
        return int(not all(map(lists_the_count, LISTED)))
    number, shares = map(int, args.share.split("/"))
    hasten()
    register_backend(Simulated(SimulatorLauncher()))
    able = [*TOGETHER, *(case for case in PROBLEMS if case.dtype in Simulated.limits.dtypes)]
    cases = able if args.all else [*smallest(8), *TOGETHER]
    chosen = cases[number - 1 :: shares]
    failed = [case.name for case in chosen if not passes(Simulated.name, case)]
    if number == 1:
        for dtype in Simulated.limits.dtypes:
            huge_scores.check(Simulated.name, dtype, seq=FEW_ROWS)
    print(f"{len(chosen)} cases, failed: {' '.join(failed) or 'none'}")
    return bool(failed or not chosen)


def lists_the_count(pattern: Pattern) -> bool:
    seq, once = 29, int(pattern.overlap == "once")
    problem = Problem(pattern=pattern, seq=seq, heads=4, kv_heads=2, head_dim=8)
    found = np.zeros((4, seq, seq))
    for group in schedule(problem, 8).groups:
        branches = group.branches.view(np.int32).reshape(-1, 4)
        part = SimpleNamespace(branches=branches)
        for tile in group.query_tiles:
            visible = VisibleRuns(*(np.zeros(shape, int) for shape in ((MAX_RUNS, 3), (MAX_BRANCHES, 3), 2)))
            row, rows, step, head = (int(tile[name]) for name in ("row", "rows", "step", "head"))
            serving = sum(1 << b for b, (*_, start, stop) in enumerate(branches) if start <= head < stop)
            chosen = int(tile["set"]) & serving
            list_visible(visible, part, chosen, row, seq, 0, seq)
            for index in range(visible.sizes[0]):
                position, bias = visible_position(visible, index, part, chosen, row, once)
                found[head, row : row + rows * step : step, position] += np.exp2(bias)
    return np.allclose(found, pattern.count(seq, 4, kv_heads=2))


def hasten():
    """Poll waiting threads less often, and find shared arrays without reading all callers' sources."""
    is_alive = kernel.BlockThread.is_alive

    def asked_slowly(thread):
        if thread.thread_id == 0:
            time.sleep(SHORT_WAIT)
        return is_alive(thread)

    def caller(frame):
        place = frame.f_back
        assert place is not None
        return [(place.f_code.co_filename, place.f_lineno), None]

    kernel.BlockThread.is_alive = asked_slowly
    kernelapi.traceback = SimpleNamespace(extract_stack=caller)


if __name__ == "__main__":
    sys.exit(main())
