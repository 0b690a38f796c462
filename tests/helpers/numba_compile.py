"""Compiles the kernels in numba.cuda for one kind of GPU, with none at hand, and prints what became of them as JSON.

    python tests/helpers/numba_compile.py 6.1 float32 64

For each kernel: its PTX's 16-byte loads from shared memory, local arrays that are no registers (depots), parameters, into
how many of them a launch packs its arguments, and, where ptxas is installed, its report.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from numba import cuda
from numba.cuda import dispatcher

from dilkit import Pattern
from dilkit.backends.cuda.report import usages
from dilkit.backends.numba.backend import NumbaCuda
from dilkit.backends.numba.kernels import KERNELS, signature
from dilkit.backends.numba.tilings import tiling_for
from dilkit.inputs import Inputs
from dilkit.problem import Problem


def main(shown: str, dtype: str, head_dim: str) -> int:
    """0; whatever does not compile raises."""
    major, minor = map(int, shown.split("."))
    device = SimpleNamespace(compute_capability=(major, minor))
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=device):
        found = {role: facts(role, dtype, int(head_dim), (major, minor)) for role in KERNELS}
    print(json.dumps(found))
    return 0


def facts(role: str, dtype: str, head_dim: int, capability: tuple[int, int]) -> dict[str, Any]:
    """What there is to know of one kernel's code."""
    tiling = tiling_for(role, head_dim)
    ptx, _ = cuda.compile_ptx(KERNELS[role](tiling), signature(role, dtype), cc=capability, device=False)
    known = {"threads": tiling.threads, "vector_loads": ptx.count("ld.shared.v4"), "depots": ptx.count("__local_depot")}
    parameters = len(re.findall(r"^\s*\.param ", ptx, re.MULTILINE))
    known |= {"parameters": parameters, "packed": packed(role, dtype, head_dim)}
    return {**known, **assembled(ptx, f"sm_{capability[0]}{capability[1]}")}


def packed(role: str, dtype: str, head_dim: int) -> int:
    """Into how many parameters numba packs the arguments that the backend hands over for a kernel."""
    problem = Problem(pattern=Pattern([8], [1]), seq=8, heads=2, head_dim=head_dim, dtype=dtype)
    x = torch.zeros(1, 8, 2, head_dim, dtype=getattr(torch, dtype))
    launcher = mock.Mock(tiling=tiling_for)
    backend = NumbaCuda(launcher)
    backend.backward(x, x, x, x, *backend.forward(Inputs(x, x, x), problem), problem)
    given = next(call.args[-1] for call in launcher.launch.call_args_list if call.args[0] == role)
    taken: list[Any] = []
    with mock.patch("numba.cuda.dispatcher.wrap_arg", OnDevice):
        for of_type, value in zip(signature(role, dtype).args, given, strict=True):
            dispatcher._Kernel._prepare_args(Packer(), of_type, value, 0, [], taken)
    return len(taken)


class Packer:
    """As much of a kernel as packing takes."""

    extensions = ()

    def _prepare_args(self, *args: Any) -> None:
        dispatcher._Kernel._prepare_args(self, *args)


class OnDevice:
    """A tensor as numba sees one on a device."""

    def __init__(self, x: torch.Tensor) -> None:
        self.size, self.shape, self.ptr = x.numel(), tuple(x.shape), x.data_ptr()
        self.dtype = SimpleNamespace(itemsize=x.element_size())
        self._layout = SimpleNamespace(strides_in_bytes=tuple(stride * x.element_size() for stride in x.stride()))

    def to_device(self, retr: list[Any], stream: Any) -> OnDevice:
        return self


def assembled(ptx: str, architecture: str) -> dict[str, Any]:
    """ptxas's report; empty where there is no ptxas."""
    spec = find_spec("nvidia")
    programs = [
        p for folder in (spec.submodule_search_locations if spec else None) or () for p in Path(folder).rglob("bin/ptxas")
    ]
    if not programs:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [programs[0], "-v", f"-arch={architecture}", "kernel.ptx", "-o", "kernel.cubin"]
        log = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stderr
    (usage,) = usages(log).values()
    return asdict(usage)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
