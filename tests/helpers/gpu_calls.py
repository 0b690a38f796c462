"""Calls of backends on GPUs, and programs: `PYTHONPATH=tests python -m helpers.gpu_calls first_call cuda:0 cupy_raw`."""

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from dilkit import Pattern, Problem, environment
from dilkit.backends.cuda import compile as cuda_compile, scores
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, CudaKernel, kernel_for, padded
from dilkit.backends.sdpa.kernels import KERNELS
from dilkit.backends.tiles.backend import ROLES
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS
from dilkit.comm import Comm, run_threads
from dilkit.comm.collectives import gather_values
from dilkit.device import Capability, device_named
from dilkit.selection.proving import cases
from dilkit.testing.accuracy import Results, expected
from dilkit.testing.conformance import check
from dilkit.testing.problems import LARGE
from dilkit.testing.tensors import Tensors
from dilkit.threads import usable_cores
from dilkit.tools.commands.verify import LISTED
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.ranks_call import RanksCall

PROGRAM = (sys.executable, "-m", "helpers.gpu_calls")
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))}
FILLING = 131072
"""Tokens that fill the largest device several times."""
TORCHS = [f"sdpa:{kernel.name}" for kernel in KERNELS if "cuda" in (kernel.limits.devices or ())]


def small_problem(device: str, **fields) -> Problem:
    facts = dict(seq=2048, heads=8, head_dim=64, device=device_named(device))
    return Problem(pattern=Pattern([256, 1024, 2048], [1, 4, 16]), **{**facts, **fields})


def all_kernels(capability: Capability) -> list[CudaKernel]:
    """Return the kernels of every dtype and head_dim, and of the problem list's packed sequences, dropout, softcaps and biases.

    Those of one compilation are next to each other.
    """
    listed = (
        (c.dtype, c.head_dim, bool(c.lengths) and not c.rows, c.dropout_p > 0, c.softcap > 0, c.problem().bias)
        for c in (*LISTED, *LARGE)
    )
    able = [(dtype, padded(dim), *how) for dtype, dim, *how in listed if dtype in STORAGE and dim <= HEAD_DIMS[-1]]
    asked = dict.fromkeys([*product(STORAGE, HEAD_DIMS, (False,), (False,), (False,), (None,)), *able])
    kernels: dict[CudaKernel, None] = {}
    for (dtype, dim, packed, dropout, *changed), role, vector, rows in product(
        asked, ROLES, (True, False), (MOST_ROWS, LOW_ROWS)
    ):
        flags = (packed, dropout, scores.macros(role, *changed)) if role != "dots" else ()
        kernels[kernel_for(role, dtype, dim, capability, vector, rows, *flags)] = None
    return sorted(kernels, key=_unit)


def compile_all(kernels: Sequence[CudaKernel], capability: Capability) -> list[str]:
    """Compile on all cores what is not in the folder of kernels; return why the compiler refuses some."""
    units = list({repr(_unit(kernel)): kernel for kernel in kernels}.values())
    with multiprocessing.get_context("spawn").Pool(min(usable_cores(), len(units))) as pool:
        return [why for why in pool.map(partial(_refusal, capability), units, chunksize=1) if why]


def _unit(kernel: CudaKernel) -> tuple[object, ...]:
    return kernel.source, sorted(kernel.macros.items())


def _refusal(capability: Capability, kernel: CudaKernel) -> str:
    try:
        cuda_compile.code_of(kernel, capability)
    except RuntimeError as error:
        return f"{kernel.name}: {error_line(error)}"
    return ""


def compare_ranks(comm: Comm, problems: Sequence[Problem]) -> list[str]:
    """Compare the results of all ranks with the oracle, and branch by branch with the bits of one rank; return complaints."""
    complaints = []
    for problem in problems:
        whole = Tensors.random(problem, seed=1)
        together = RanksCall(comm, problem).together(whole)
        by_branch = RanksCall(comm, problem, fuse_branches=False).together(whole)
        (alone,) = run_threads(1, partial(_alone, problem=problem, whole=whole))
        if not all(gather_values(comm, all(torch.equal(x, alone[name]) for name, x in by_branch.items()))):
            complaints.append("branch by branch, the bits differ from those of one rank")
        if comm.rank == 0:
            complaints += [one.complaint for one in expected(problem, whole).checks(together, problem.seq) if not one.passed]
    return complaints


def _alone(comm: Comm, problem: Problem, whole: Tensors) -> Results:
    return RanksCall(comm, problem, fuse_branches=False).together(whole)


def first_call(device: str, backend: str):
    asked = small_problem(device, dtype="bfloat16", requires_grad=True)
    inputs = Tensors.random(asked)
    for proof in ("off", "always"):
        os.environ[environment.GPU_PROOF.name] = proof
        began = time.perf_counter()
        backend_implementations([backend])[0].once(inputs, asked)[0].sum().item()
        print(time.perf_counter() - began)


def small_cases(device: str, backend: str):
    whole, packed = (cases("bfloat16", 64, True, varlen) for varlen in (False, True))
    listed = [case for case in (*whole, *packed) if case.variant in ("full", "causal mask", "once, strided", "packed causal")]
    results = [check(backend, case, device) for case in listed]
    print(f"computed {sum(result.verdict == 'passed' for result in results)} of {len(results)} cases rightly")


def long_passes(device: str, backend: str):
    """Compute a forward and a backward pass in bf16 and in fp32, of rows enough to fill the largest device."""
    for dtype in ("bfloat16", "float32"):
        asked = replace(small_problem(device, dtype=dtype, requires_grad=True), seq=FILLING)
        backend_implementations([backend])[0].once(Tensors.random(asked), asked)


def sanitizer_findings(text: str) -> list[str]:
    return re.findall(r"^=+ .*(?:Invalid|Misaligned|Error: Race|Error: Potential).*$", text, re.MULTILINE)


if __name__ == "__main__":
    {"first_call": first_call, "small_cases": small_cases, "long_passes": long_passes}[sys.argv[1]](*sys.argv[2:])
