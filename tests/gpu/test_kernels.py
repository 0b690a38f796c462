"""Kernels compiled, loaded, launched and sanitized."""

import re
import shutil
import subprocess
from collections import Counter

import pytest
import torch
from helpers.gpu_calls import PATH, PROGRAM, all_kernels, compile_all, sanitizer_findings, small_problem

from dilkit import environment
from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda.launch import CupyLauncher
from dilkit.backends.cuda.table import HEAD_DIMS
from dilkit.backends.triton import sizes
from dilkit.comm.launch import processes
from dilkit.device import device_named
from dilkit.selection.proving import cases
from dilkit.testing.conformance import check
from dilkit.threads import usable_cores
from dilkit.tools.commands.machine import versions
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.implementation import backend_implementations

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

ASSUMED = (9, 0)
STATE = "driver_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.limit,ecc.mode.current"
KINDS = ({}, dict(varlen=True), dict(dropout=True), dict(varlen=True, dropout=True))
SANITIZER = "compute-sanitizer"
OPTIONS = ["--report-api-errors", "no", "--print-limit", "5", "--launch-timeout", "0", "--target-processes", "application-only"]
"""torch and CuPy make some failing API calls on purpose, not reported. It is long before torch makes the first of all."""
WATCHED = [word for name in ("forward", "dquery", "dkeyvalue", "dots") for word in ("--kernel-name", f"kernel_substring={name}")]
"""Our kernels by their names; torch's are not looked at."""


def test_the_machine_has_what_it_has(device, stored_oracle, note):
    note("stored results of the oracle", f"{len(stored_oracle.cases) if stored_oracle else 0} cases")
    for name, version in versions().items():
        note(name, str(version))
    for name in ("nvcc", "ncu", SANITIZER, "mpirun", "gcc"):
        note(name, shutil.which(name) or "not on the path")
    if smi := shutil.which("nvidia-smi"):
        command = [smi, f"--query-gpu={STATE}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        note(f"nvidia-smi: {STATE}", done.stdout.strip() or done.stderr.strip())
    assert device_named(device).name


@pytest.mark.timeout(400, method="thread")
def test_the_compiler_takes_every_kernel(device, rehearsal, note):
    try:
        version = ".".join(map(str, cuda_compile.compiler_version()))
    except RuntimeError as error:
        pytest.skip(error_line(error))
    capability = device_named(device).capability or ASSUMED
    kernels = all_kernels(capability)[: 2 if rehearsal else None]
    if refused := compile_all(kernels, capability):
        pytest.fail(f"cupy_raw: {'; '.join(refused)}")
    note("kernels", f"{len(kernels)} for sm_{capability[0]}{capability[1]}, NVRTC {version}, in {environment.cuda_cache()}")


def test_every_kernel_is_loaded_and_occupies_what_the_table_promises(device, cuda, note):
    if reasons := backend_implementations(["cupy_raw"])[0].refusals(small_problem(device)):
        pytest.skip("; ".join(reasons))
    launcher, where, counts = CupyLauncher(), torch.device(device), Counter[str]()
    processors = torch.cuda.get_device_properties(where).multi_processor_count
    for kernel in all_kernels(device_named(device).capability or ASSUMED):
        try:
            blocks = launcher.resident(kernel, where) // processors
        except Exception as error:
            pytest.fail(f"cupy_raw: {kernel.name} {dict(kernel.defines)}: {error_line(error)}")
        counts["as promised" if blocks == kernel.blocks else "fewer" if blocks < kernel.blocks else "more"] += 1
        if blocks < kernel.blocks:
            note(f"{kernel.name} {dict(kernel.defines)}", f"the table promises {kernel.blocks} blocks, the driver {blocks}")
    note("blocks on a multiprocessor", ", ".join(f"{count} {what}" for what, count in counts.items()))


@pytest.mark.parametrize("any_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_kernel_is_launched(backend, any_dtype, head_dim, device, rehearsal):
    if (backend == "triton" and head_dim not in sizes.HEAD_DIMS) or (rehearsal and (head_dim > 16 or any_dtype == "float16")):
        pytest.skip("no kernels of their own, or a rehearsal")
    every = [case for kind in KINDS[: 1 if rehearsal else None] for case in cases(any_dtype, head_dim, gradients=True, **kind)]
    results = [check(backend, case, device) for case in every]
    assert not [f"{result.case.name}: {result.reasons}" for result in results if result.verdict in ("failed", "broken")]
    if not any(result.verdict == "passed" for result in results):
        pytest.skip("; ".join(results[0].reasons))


def test_the_first_call_of_a_process(backend, device, note):
    job = processes.start_processes([[*PROGRAM, "first_call", device, backend]], [PATH], threads=usable_cores())
    ended = job.finish(110)
    assert ended.code == 0, ended.text
    first, proven = map(float, ended.text.split()[-2:])
    note(f"{backend}: first call", f"{first:.3g} s", seconds=first)
    note(f"{backend}: first call with its proof", f"{proven:.3g} s", seconds=proven)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool, backend, device, cuda, note):
    """A tool that does not support the device looks at nothing, and may fail whatever runs in it."""
    if (path := shutil.which(SANITIZER)) is None:
        pytest.skip(f"{SANITIZER} is not on the path")
    command = [path, "--tool", tool, *OPTIONS, *WATCHED, *PROGRAM, "small_cases", device, backend]
    own = dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1") if tool == "memcheck" else {}  # every tensor has bounds of its own
    ended = processes.start_processes([command], [PATH | own], threads=usable_cores()).finish(100)
    assert not (wrong := sanitizer_findings(ended.text)), wrong
    computed = re.search(r"^computed ([1-9]\d*) of", ended.text, re.MULTILINE)
    if computed is None:
        pytest.skip(f"exit status {ended.code}: {ended.text.strip()[-300:]}")
    note(f"{tool}, {backend}", computed[0])
