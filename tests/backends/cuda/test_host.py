"""Faults that the host shim catches in kernels."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.host_compile import SHIM
from helpers.host_launcher import ORDERS, HostLauncher, KernelError, argument_spans
from numpy.typing import NDArray

from dilkit import Pattern
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.tiles.schedule import schedule
from dilkit.problem import Problem

ARGUMENTS = np.dtype([("in", np.uint64), ("out", np.uint64), ("counter", np.uint64), ("what", np.int32)], align=True)
THREADS, BLOCKS, DYNAMIC = 128, 6, 512


def run(name: str, what: int = 0, launcher: HostLauncher | None = None, more: tuple[str, ...] = (), **options):
    macros = dict(THREADS=THREADS, BLOCKS=1, STORAGE=0, **dict.fromkeys(more, 1))
    kernel = SimpleNamespace(source=SHIM / "trials.cu", name=name, macros=macros, shared_bytes=DYNAMIC)
    given, out, counter = np.arange(1000, dtype=np.float32), np.zeros((BLOCKS, THREADS), np.float32), np.zeros(1, np.int32)
    given = aligned(given)
    given.flags.writeable = False
    places = {"in": given, "out": out if name != "counting" else np.zeros(1000, np.float32), "counter": counter}
    arguments = np.array((*(x.ctypes.data for x in places.values()), what), ARGUMENTS)
    (launcher or HostLauncher(**options)).launch(kernel, BLOCKS, arguments, memory=places)
    return places["out"]


def aligned(array: NDArray[np.float32]) -> NDArray[np.float32]:
    space = np.empty(len(array) + 4, np.float32)
    first = -space.ctypes.data // 4 % 4
    space[first : first + len(array)] = array
    return space[first : first + len(array)]


def line_of(what: int) -> str:
    lines = (SHIM / "trials.cu").read_text().splitlines()
    return str(next(i for i, line in enumerate(lines, 1) if line.startswith(f"    case {what}: ")))


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_a_right_kernel_gives_the_same_in_any_order(order, workers, checked):
    assert (run("right", order=order, workers=workers, checked=checked, seed=workers) == 499500).all()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (0, r"thread 32: .* waits in synchronize \(.*trials.cu:\d+\), thread 40 in synchronize \(.*trials.cu:\d+\)"),
        (1, "thread 32: .* waits in synchronize .*, thread 40 has finished"),
        (2, r"thread (0|64|96): .* waits in synchronize_warp \(.*, thread (7|71|103) in synchronize \("),
        (5, "thread (0|64|96): .* waits in ballot .*, thread (1|65|97) in shuffle"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_threads_that_diverge(what, said, order):
    with pytest.raises(KernelError, match=f"^diverging, block 0, {said}"):
        run("diverging", what, order=order)


@pytest.mark.parametrize(
    ("checked", "what", "said"),
    [
        (False, 0, r"out of bounds: 4 bytes at byte 4000 of in, which has 4000 \(.*trials.cu:{line}\)"),
        (False, 2, "out of bounds: 4 bytes at byte 3072 of out, which has 3072"),
        (False, 4, "misaligned: .* is no multiple of 16"),
        (False, 7, "out of bounds: 16 bytes at byte 4000 of in"),
        (False, 10, "out of bounds: 4 bytes at byte 4 of counter"),
        (False, 12, "finished with 1 copies that it never waited for"),
        (False, 13, "byte 512 of dynamic shared memory was written: there are 512"),
        (False, 14, "written, though it is only to be read: byte 0 of in"),
        (True, 13, r"it writes 1 bytes at byte 512 of dynamic shared memory, which has 512 \(trials.cu:\d+\)"),
        (True, 20, r"thread 77: index 177 is out of bounds of 'float \[128\]' \(.*trials.cu:{line}\)"),
        (True, 22, "thread 64: out of bounds: it reads 4 bytes at byte 512 of dynamic shared memory, which has 512"),
        (True, 23, "out of bounds: 4 bytes at byte 4000 of in, which has 4000 .read or written without LOAD or STORE"),
        (True, 26, r"thread 0: overflow: 26 \* 100000000 is no 'int' \(.*trials.cu:{line}\)"),
    ],
)
def test_memory_that_is_not_the_kernels(checked, what, said):
    with pytest.raises(KernelError, match=f"^outside, block 0.*{said.replace('{line}', line_of(what))}"):
        run("outside", what, checked=checked)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("what", range(10))
def test_races(what, order):
    if what % 2 == 0:
        run("racing", what, order=order, checked=True)
        return
    with pytest.raises(KernelError, match=r"race: it (reads|writes) byte \d+ of [abc] \(trials.cu:\d+\), which thread \d+ "):
        run("racing", what, order=order, checked=True)


@pytest.mark.parametrize("what", [0, 1])
def test_shared_memory_is_no_number_at_the_start_of_every_block(what):
    assert np.isnan(run("unwritten", what, workers=1)).all()


@pytest.mark.parametrize(("stride", "turns"), [(1, 1), (2, 2), (4, 4), (8, 8), (9, 1), (0, 1)])
def test_turns_of_rows_in_the_same_banks_are_counted(stride, turns):
    launcher = HostLauncher()
    run("striding", stride, launcher)
    assert launcher.matrices == BLOCKS * THREADS // 32 * 4
    assert launcher.conflicts == launcher.matrices * (turns - 1)


def test_a_call_says_what_memory_is_its_own():
    problem = Problem(pattern=Pattern.dense(), batch=2, seq=5, heads=4, kv_heads=2, head_dim=3)
    packed, out, mask = torch.zeros(2, 5, 8, 3, dtype=torch.float16), torch.zeros(2, 5, 4, 3), torch.zeros(2, 7, dtype=torch.bool)
    tensors = dict(query=packed[:, :, :4], key=packed[:, :, 4:6], out=out, lse=torch.zeros(2, 4, 5), mask=mask[:, :5])
    (group,) = schedule(problem, 64).groups
    arguments = make_arguments(problem, tensors, group, 3, {"tiles": 4096}, first=True)
    found = {name: (address, size, constant) for address, size, name, constant in argument_spans(arguments[()], 2)}
    last = {"query": packed[1, 4, 3, 2:], "key": packed[1, 4, 5, 2:], "mask": mask[1, 4:]}
    for name, end in last.items():
        first = tensors[name].data_ptr()
        assert found.pop(name) == (first, end.data_ptr() + end.element_size() - first, True)
    assert found.pop("lse") == (tensors["lse"].data_ptr(), tensors["lse"].nbytes, False)
    assert found == {"out": (out.data_ptr(), out.numel() * 2, False), "tiles": (4096, 48, True)}


def test_blocks_share_a_counter():
    assert (run("counting", workers=3) == np.arange(1000)).all()


def test_without_a_switch_of_its_own_for_the_processor():
    assert (run("right", more=("HOST_UCONTEXT",)) == 499500).all()
    assert (run("counting", more=("HOST_UCONTEXT",), order="random") == np.arange(1000)).all()
    with pytest.raises(KernelError, match="thread 40 has finished"):
        run("diverging", 1, more=("HOST_UCONTEXT",))


def test_more_shared_memory_than_any_gpu_has_is_refused():
    kernel = SimpleNamespace(source=SHIM / "trials.cu", name="right", macros=dict(THREADS=32, BLOCKS=1, STORAGE=0))
    kernel.shared_bytes = 229 * 1024
    with pytest.raises(KernelError, match="234496 bytes of dynamic shared memory: there are at most 233472"):
        HostLauncher().launch(kernel, 1, np.zeros((), ARGUMENTS), memory={})
