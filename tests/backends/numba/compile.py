"""Compiles the kernels in numba.cuda for one kind of GPU, with none at hand, and prints what became of them as JSON.

    python tests/backends/numba/compile.py 6.1 float32 64

For each kernel: its PTX's 16-byte loads from shared memory, local arrays that are no registers (depots), and ptxas's report.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from numba import cuda

from dilkit.backends.cuda.report import usages
from dilkit.backends.numba.arguments import signature
from dilkit.backends.numba.backend import NumbaLauncher, kernels


def main(shown: str, dtype: str, head_dim: str) -> int:
    major, minor = map(int, shown.split("."))
    device = SimpleNamespace(compute_capability=(major, minor))
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=device):
        print(json.dumps({role: facts(role, dtype, int(head_dim), (major, minor)) for role in kernels()}))
    return 0


def facts(role: str, dtype: str, head_dim: int, capability: tuple[int, int]) -> dict[str, Any]:
    tiling = NumbaLauncher().tiling(role, head_dim)
    ptx, _ = cuda.compile_ptx(kernels()[role](tiling), signature(role, dtype), cc=capability, device=False)
    known = {"threads": tiling.threads, "vector_loads": ptx.count("ld.shared.v4"), "depots": ptx.count("__local_depot")}
    return {**known, **assembled(ptx, f"sm_{capability[0]}{capability[1]}")}


def assembled(ptx: str, architecture: str) -> dict[str, Any]:
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    programs = [program for folder in folders or () for program in Path(folder).rglob("bin/ptxas")]
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
