"""What reaches CUDA's driver through the true CuPy: `tests/helpers/stub_driver.py` says what is true there and what is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.project import ROOT
from helpers.stub_driver import DEVICE, Event, Seen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: it compiles the driver"),
    pytest.mark.skipif(sys.platform != "linux", reason="the driver is a library for Linux"),
]
KERNELS = ["mma_forward", "row_dots", "mma_dquery_pairs", "mma_dkeyvalue"]
CARVEOUT, MAX_DYNAMIC, SHARED_OF_MULTIPROCESSOR = 9, 8, 81
LAUNCHES = ("cuLaunchKernel", "captured")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Four calls of forward and backward: on the default stream, on another, on one with the same handle, captured on it."""
    pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    library, here = tmp_path_factory.mktemp("driver") / "libcuda.so.1", Path(__file__).parent
    named = "-shared", "-fPIC", f"-Wl,-soname,{library.name}"
    subprocess.run(["gcc", "-std=gnu11", "-Wall", "-Werror", *named, here / "driver/driver.c", "-o", library], check=True)
    command = [sys.executable, ROOT / "tests/helpers/stub_driver.py", library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    found["events"] = {name: [Event(**event) for event in events] for name, events in found["events"].items()}
    return Seen(**found)


def launches(seen: Seen, name: str) -> list[Event]:
    return [event for event in seen.events[name] if event.call in LAUNCHES]


def test_what_is_launched_computes_what_the_cpu_does(seen: Seen) -> None:
    """With grid and arguments as the driver got them; gradients are of the order of 1."""
    assert max(seen.errors.values()) < 0.01
    for name in seen.events:
        assert [event.name for event in launches(seen, name)] == KERNELS


def test_attributes_are_set_between_loading_and_launching(seen: Seen) -> None:
    about = [event for event in seen.events["first"] if event.call != "ensure context"]
    for kernel in KERNELS:
        own = [event for event in about if event.name == kernel]
        [launch] = launches(seen, "first")[KERNELS.index(kernel) : KERNELS.index(kernel) + 1]
        dynamic = launch.second >> 32
        carve_out = ("cuFuncSetAttribute", CARVEOUT, 100)
        larger = [("cuFuncSetAttribute", MAX_DYNAMIC, dynamic)] if dynamic else []
        assert [(event.call, event.first, event.second) for event in own[1:-2]] == [carve_out, *larger]
        assert [event.call for event in (own[0], *own[-2:])] == [
            "cuModuleGetFunction",
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            "cuLaunchKernel",
        ]
    assert {launch.second >> 32 for launch in launches(seen, "first")} > {0}


def test_grids_are_the_blocks_that_run_at_once(seen: Seen) -> None:
    """Of 4 tiles or more on two multiprocessors of one block each; the stub refuses grids and blocks that no GPU takes."""
    asked = {event.name: event for event in seen.events["first"] if event.call.startswith("cuOccupancy")}
    for launch in launches(seen, "first"):
        assert launch.first == 2
        assert (launch.second & 0xFFFFFFFF, launch.second >> 32) == (asked[launch.name].first, asked[launch.name].second)


def test_the_arguments_are_as_long_as_the_machine_code_wants(seen: Seen) -> None:
    found = [(event.first, event.second) for event in seen.events["first"] if event.call == "cuModuleGetFunction"]
    assert found == [(1, seen.argument_bytes)] * len(KERNELS)


def test_launches_go_to_the_current_stream_of_the_device(seen: Seen) -> None:
    """The stub refuses streams and functions of another device."""
    for name, stream in seen.streams.items():
        assert {(event.device, event.stream or 0) for event in launches(seen, name)} == {(DEVICE, stream)}
    assert seen.streams["on a stream"] != 0


def test_kernels_are_loaded_once_and_the_device_is_asked_once_what_it_holds(seen: Seen) -> None:
    loads = {name: sum(event.call == "cuModuleLoadData" for event in events) for name, events in seen.events.items()}
    assert loads == {"first": len(KERNELS), "on a stream": 0, "on the next stream": 0, "captured": 0}
    asked = [event for name in loads for event in seen.events[name] if event.call == "cuDeviceGetAttribute"]
    assert [(event.first, event.second) for event in asked] == [(SHARED_OF_MULTIPROCESSOR, DEVICE)]


def test_the_device_that_was_current_is_current_again(seen: Seen) -> None:
    """One that has no context is left without."""
    assert seen.contexts == [False, True]
    assert [seen.devices[name] for name in ("on a stream", "on the next stream", "captured")] == [0, 0, 0]


def test_a_capture_takes_all_launches_and_nothing_else(seen: Seen) -> None:
    calls = [event.call for event in seen.events["captured"] if event.call not in ("ensure context", "cuDeviceGetAttribute")]
    assert calls == ["captured"] * len(KERNELS) + ["cuStreamEndCapture"]
    [begin] = (event for event in seen.events["on the next stream"] if event.call == "cuStreamBeginCapture")
    assert begin.stream == seen.streams["captured"]
    assert not any(event.call == "captured" for name, events in seen.events.items() for event in events if name != "captured")


def test_counters_are_of_a_stream_or_of_a_captured_launch(seen: Seen) -> None:
    """Of a stream, not of its handle, which is that of another now."""
    counted = {name: [counter for counter in counters if counter] for name, counters in seen.counters.items()}
    assert seen.streams["on a stream"] == seen.streams["on the next stream"]
    assert [len(set(counters)) for counters in counted.values()] == [1, 1, 1, 3]
    assert len({counter for counters in counted.values() for counter in counters}) == 6
