"""Calls of CUDA's driver through the true CuPy; `driver/calls.py` has its substitute."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: it compiles the driver"),
    pytest.mark.skipif(sys.platform != "linux", reason="the driver is a library for Linux"),
]
HERE = Path(__file__).parent / "driver"
KERNELS = ["mma_forward", "row_dots", "mma_dquery_pairs", "mma_dkeyvalue"]
CARVEOUT, MAX_DYNAMIC, SHARED_OF_MULTIPROCESSOR, DEVICE = 9, 8, 81, 1
BLOCKS = 2
"""Blocks that run at once on two multiprocessors of one block each, with 4 tiles or more."""
OCCUPANCY, LAUNCHES = "cuOccupancyMaxActiveBlocksPerMultiprocessor", ("cuLaunchKernel", "captured")
Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Seen:
    """Run forward and backward on the default stream, another, one with the same handle, and captured."""
    pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    named = "-shared", "-fPIC", f"-Wl,-soname,{library.name}"
    subprocess.run(["gcc", "-std=gnu11", "-Wall", "-Werror", *named, HERE / "driver.c", "-o", library], check=True)
    done = subprocess.run([sys.executable, HERE / "calls.py", library], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_launches_bring_their_arguments_to_the_current_stream(seen):
    for call in seen.values():
        launches = [event for event in call["events"] if event[0] in LAUNCHES]
        assert [name for *_, name, _, _ in launches] == KERNELS
        assert {(device, stream) for _, device, stream, *_ in launches} == {(DEVICE, call["stream"])}
        assert call["arrived"]
    assert seen["first"]["contexts"] == [False, True]
    assert [call["device"] for call in seen.values()][1:] == [0, 0, 0]


def test_kernels_are_loaded_once_and_have_their_attributes_before_they_run(seen):
    events = seen["first"]["events"]
    for kernel in KERNELS:
        own = [(call, *about) for call, _, _, name, *about in events if name == kernel]
        threads, dynamic = own[-1][2] & 0xFFFFFFFF, own[-1][2] >> 32
        larger = [("cuFuncSetAttribute", MAX_DYNAMIC, dynamic)] if dynamic else []
        first = [("cuModuleGetFunction", 0, 0), ("cuFuncSetAttribute", CARVEOUT, 100)]
        assert own == [*first, *larger, (OCCUPANCY, threads, dynamic), ("cuLaunchKernel", BLOCKS, own[-1][2])]
    assert any(event[0] == "cuLaunchKernel" and event[5] >> 32 for event in events)
    loads = [sum(event[0] == "cuModuleLoadData" for event in call["events"]) for call in seen.values()]
    assert loads == [len(KERNELS), 0, 0, 0]
    asked = [event[4:] for call in seen.values() for event in call["events"] if event[0] == "cuDeviceGetAttribute"]
    assert asked == [[SHARED_OF_MULTIPROCESSOR, DEVICE]]


def test_a_capture_takes_all_launches_and_nothing_else_and_counters_are_of_a_stream_or_of_a_captured_launch(seen):
    captured = {name: [event[0] == "captured" for event in call["events"]] for name, call in seen.items()}
    assert captured.pop("captured") == [True] * len(KERNELS)
    assert not any(map(any, captured.values()))
    counted = [{counter for counter in call["counters"] if counter} for call in seen.values()]
    assert [len(counters) for counters in counted] == [1, 1, 1, 3]
    assert len(set.union(*counted)) == 6
