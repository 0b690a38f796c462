"""Times and counters of kernels by themselves, one after the other."""

import csv
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
from helpers.gpu_calls import FILLING, PATH, PROGRAM, small_problem

from dilkit import registry
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS
from dilkit.comm.launch import processes
from dilkit.device import device_named
from dilkit.testing.tensors import Tensors
from dilkit.threads import usable_cores
from dilkit.tools.bench.suites.gpu import CONFIGURATIONS
from dilkit.tools.console.text import in_seconds
from dilkit.tools.measure.implementation import backend_implementations
from dilkit.tools.measure.timing import time_interleaved

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

KERNELS = ("mma_forward", "mma_dquery", "mma_dkeyvalue", "fp32_forward", "fp32_dkeyvalue")
SECTIONS = ("SpeedOfLight", "WarpStateStats", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats")
METRICS = (
    *("Duration", "Compute (SM) Throughput", "Memory Throughput", "DRAM Throughput", "L1/TEX Cache Throughput"),
    *("L2 Cache Throughput", "Warp Cycles Per Issued Instruction", "Achieved Occupancy", "Registers Per Thread"),
)
PARTS = 16
HEIGHTS = {"tall": MOST_ROWS, "low": LOW_ROWS}


@pytest.mark.parametrize("who", ["cupy_raw"])
def test_counters_of_the_profiler(who, device, cuda, note, request):
    """Clocks are left as they are. All that ncu prints goes into a file beside the day's."""
    if (path := shutil.which("ncu")) is None:
        pytest.skip("ncu is not on the path")
    if reasons := backend_implementations([who])[0].refusals(small_problem(device, seq=FILLING, requires_grad=True)):
        pytest.skip("; ".join(reasons))
    command = [path, "--csv", "--page", "details", "--print-details", "all", "--clock-control", "none"]
    command += ["--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(KERNELS)})$"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    job = processes.start_processes([[*command, *PROGRAM, "long_passes", device, who]], [PATH], threads=usable_cores())
    ended = job.finish(110)
    if file := request.config.getoption("--gpu-day"):
        Path(file).with_name("counters.csv").write_text(ended.text)
    if not (counters := first_launches(ended.text.splitlines())):
        said = [line for line in ended.text.splitlines() if line.startswith("==ERROR==")]
        pytest.skip(f"exit status {ended.code}: {(said or ['no counters'])[0]}")
    for kernel, values in counters.items():
        note(kernel, ", ".join(f"{metric} {value}" for metric, value in values.items()))


def first_launches(lines):
    """Read ncu's table: the metrics of the first launch of each kernel, with their units."""
    counters = {}
    first = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        kernel, metric = str(row.get("Kernel Name")).partition("(")[0], str(row.get("Metric Name"))
        if first.setdefault(kernel, str(row.get("ID"))) == row.get("ID") and metric in METRICS:
            counters.setdefault(kernel, {})[metric] = f"{row.get('Metric Value')} {row.get('Metric Unit')}".strip()
    return counters


@pytest.mark.parametrize("letter", ["A", "B"])
def test_tall_tiles_beside_low_ones(letter, requires_grad, device, note):
    names = {name: f"cupy_raw: {name}" for name in HEIGHTS}
    for name, rows in HEIGHTS.items():
        backend = CupyRaw(tile_rows=rows)
        backend.name = names[name]
        registry.register_backend(backend)
    try:
        for head_dim, causal in product((64, 128), (False, True)):
            options = dict(dtype="bfloat16", is_causal=causal, requires_grad=requires_grad)
            problem = CONFIGURATIONS[letter].problem(head_dim, device=device_named(device), **options)
            implementations = backend_implementations(list(names.values()))
            if reasons := implementations[0].refusals(problem):
                pytest.skip("; ".join(reasons))
            inputs = Tensors.random(problem)
            calls = {one.name: partial(one.once, inputs, problem) for one in implementations}
            times = {name: row.median_s for name, row in time_interleaved(calls, 7, 2, 0.01, problem.device.type).items()}
            tall, low = (times[names[name]] for name in HEIGHTS)
            note(str(problem), f"tall {in_seconds(tall)}, low {in_seconds(low)}: {tall / low:.2f}", tall=tall, low=low)
    finally:
        for name in names.values():
            registry.unregister_backend(name)


@pytest.mark.parametrize("part", range(PARTS))
def test_other_sizes_are_compiled(part, cuda, device):
    """They are right, and then in the cache of Triton's compiler, before one process measures their times."""
    sizes = pytest.importorskip("test_sizes")
    every = sizes.candidates
    with mock.patch.multiple(
        sizes, candidates=lambda *of: every(*of)[: sizes.MOST][part::PARTS], time_interleaved=lambda *_, **__: {}
    ):
        for role, head_dim in product(sizes.TUNED_ROLES, (64, 128)):
            sizes.test_other_sizes_are_right(role, head_dim, device, False, lambda *_, **__: None)
