"""Counters of the profiler for five kernels, where it is there and allowed: how busy a multiprocessor and its memory are.

`python -m dilkit.tools.gpu_day.preferences.counters DEVICE` makes the calls that are profiled.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dilkit.device import device_named
from dilkit.testing.tensors import Tensors
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.step import Context, Item, absent, noted
from dilkit.tools.measure.implementation import backend_implementations

KERNELS = ("mma_forward", "mma_dquery", "mma_dkeyvalue", "fp32_forward", "fp32_dkeyvalue")
SECTIONS = ("SpeedOfLight", "Occupancy", "MemoryWorkloadAnalysis", "LaunchStats")
METRICS = (
    "Duration",
    "Compute (SM) Throughput",
    "Memory Throughput",
    "DRAM Throughput",
    "L1/TEX Cache Throughput",
    "L2 Cache Throughput",
    "Achieved Occupancy",
    "Registers Per Thread",
)
SEQ = 131072
"""Rows enough to fill the largest device several times."""


def counters(context: Context) -> Iterator[Item]:
    """The first launch of each kernel. Clocks are left as they are."""
    path = shutil.which("ncu")
    if path is None or context.kind != "cuda":
        yield absent("ncu", "no CUDA device" if path else "not on the path")
        return
    command = [path, "--csv", "--page", "details", "--clock-control", "none", "--kernel-name-base", "function"]
    command += ["--kernel-name", f"regex:^({'|'.join(KERNELS)})$", *(word for name in SECTIONS for word in ("--section", name))]
    command += [sys.executable, "-m", __spec__.name, context.device]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    by_kernel = read(done.stdout.splitlines())
    for name, values in by_kernel.items():
        yield noted(name, ", ".join(f"{metric} {value}" for metric, value in values.items()))
    if not by_kernel:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")]
        yield absent("ncu", f"exit status {done.returncode}: {(said or ['no counters'])[0]}")


def read(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Of what ncu prints: for the first launch of each kernel its metrics, each with its unit."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    by_kernel: dict[str, dict[str, str]] = {}
    first: dict[str, str] = {}
    for row in rows:
        name, metric = str(row.get("Kernel Name")).partition("(")[0], row.get("Metric Name")
        if first.setdefault(name, str(row.get("ID"))) == row.get("ID") and metric in METRICS:
            by_kernel.setdefault(name, {})[metric] = f"{row.get('Metric Value')} {row.get('Metric Unit')}".strip()
    return by_kernel


def main(device: str) -> int:
    """A forward and a backward pass in bf16 and in fp32, of a pattern whose branches share tiles."""
    for dtype in ("bfloat16", "float32"):
        asked = replace(backends.problem(device_named(device), dtype=dtype, requires_grad=True), seq=SEQ)
        inputs = Tensors.random(asked)
        backend_implementations(["cupy_raw"])[0].once(inputs, asked)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
