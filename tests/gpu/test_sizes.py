"""Other sizes of the kernels in Triton."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dilkit import Pattern
from dilkit.backends.triton.backend import TUNED_ROLES, TritonTiles
from dilkit.device import device_named
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.console.text import error_line, in_seconds
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.measure.triton_sizes import Chosen, candidates

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400, method="thread")]

PATTERN = Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
MOST = 13


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("role", TUNED_ROLES)
def test_other_sizes_are_right(role, head_dim, device, rehearsal, note):
    sizes = dict(seq=2048 if rehearsal else 2**15, heads=8, head_dim=head_dim, dtype="bfloat16", requires_grad=role != "forward")
    problem = Problem(pattern=PATTERN, device=device_named(device), **sizes)
    if reasons := TritonTiles().refusals(problem):
        pytest.skip("; ".join(map(str, reasons)))
    inputs = Inputs(*(x.detach() for x in Tensors.random(replace(problem, requires_grad=False)).qkv))
    out, lse = TritonTiles().forward(inputs, problem)
    calls = dict[str, Callable[[], Any]]()
    right = (out, lse) if role == "forward" else TritonTiles().backward(out, inputs, out, lse, problem)
    for chosen in candidates(role, problem)[:MOST]:
        backend = TritonTiles(Chosen(role, chosen))
        forward = partial(backend.forward, inputs, problem)
        call = forward if role == "forward" else partial(backend.backward, out, inputs, out, lse, problem)
        try:
            results = call()
        except Exception as error:
            note(f"{role}, head_dim {head_dim}: {chosen}", error_line(error))
            continue
        for ours, theirs in zip(results, right, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))
        calls[str(chosen)] = call
    for name, row in time_interleaved(calls, min_time=0.02, device=torch.device(device).type).items():
        note(f"{role}, head_dim {head_dim}: {name}", in_seconds(row.median_s), seconds=row.median_s)
