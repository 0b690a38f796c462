"""Conversions, products and copies of the host shim, by a plain definition; elements of matrices lie where CUTLASS has them."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.host_compile import KERNELS, SHIM
from helpers.host_launcher import HostLauncher
from numpy.typing import NDArray
from ptx.emulator import MACHINE

from dilkit.backends.cuda.compile import OPTIONS, compiled

GENERATOR = np.random.default_rng(5)
ARGUMENTS = np.dtype([("in", np.uint64), ("out", np.uint64), ("what", np.int32), ("amount", np.int32)])

SPECIAL = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x387FFFFF, 0x33000000, 0x33000001, 0x477FEFFF, 0x477FF000], np.uint32
)
FLOATS = np.concatenate(
    [SPECIAL, GENERATOR.integers(0, 2**32, 100_000, np.uint32), (np.arange(0x3300, 0x4800) << 12).astype(np.uint32) << 4]
)
FLOATS = FLOATS[~np.isnan(FLOATS.view(np.float32))]


def run(name: str, given: NDArray[Any], words: int, what: int = 0, amount: int = 0, threads: int = 32, blocks: int = 1):
    macros = dict(THREADS=threads, BLOCKS=1, STORAGE=1)
    kernel = SimpleNamespace(source=SHIM / "instructions.cu", name=name, macros=macros, shared_bytes=0)
    given = np.ascontiguousarray(given).view(np.uint32)
    results = []
    for order in ("forward", "reverse", "random"):
        out = np.zeros(words, np.uint32)
        arguments = np.array((given.ctypes.data, out.ctypes.data, what, amount), ARGUMENTS)
        HostLauncher(order, checked=order == "random").launch(kernel, blocks, arguments, memory={"in": given, "out": out})
        results.append(out)
    assert all((out == results[0]).all() for out in results)
    return results[0]


def each(words: NDArray[np.uint32], what: int) -> NDArray[np.uint32]:
    blocks = -(-len(words) // 64)
    given = np.concatenate([words, np.zeros(blocks * 64 - len(words), np.uint32)])
    return run("words", given, blocks * 64, what, threads=64, blocks=blocks)[: len(words)]


@pytest.mark.parametrize(("what", "dtype"), [(0, torch.float16), (1, torch.bfloat16)])
def test_every_number_of_two_bytes_becomes_a_float(what, dtype):
    bits = np.arange(65536, dtype=np.uint16)
    want = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(each(bits.astype(np.uint32), what).view(np.float32), want)


@pytest.mark.parametrize(("what", "dtype"), [(2, torch.float16), (3, torch.bfloat16)])
def test_floats_are_rounded_to_nearest_even_and_none_becomes_a_number(what, dtype):
    want = torch.from_numpy(FLOATS.view(np.float32)).to(dtype).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(each(FLOATS, what), want)
    packed = each(FLOATS, what + 2)
    np.testing.assert_array_equal(packed & 0xFFFF, want)
    np.testing.assert_array_equal(packed >> 16, want ^ 0x8000)
    assert (each(np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32), what) == 0x7FFF).all()


def lanes_of(name: str) -> NDArray[np.int64]:
    """Return the PTX machine's table of a matrix, made from the layouts of CUTLASS."""
    text = re.search(rf"{name}\[32\]\[\d+\] = \{{(.*?)\}};", (MACHINE / "layouts.h").read_text(), re.DOTALL)
    assert text is not None
    return np.array([[*map(int, row.split(","))] for row in re.findall(r"\{([^{}]+)\}", text[1])])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [8, 16])
def test_products_take_what_lies_where_cutlass_puts_it(k, dtype):
    torch.manual_seed(k)
    left, right, total = torch.randn(16, k).to(dtype), torch.randn(k, 8).to(dtype), torch.randn(16, 8)
    held = [x[torch.from_numpy(lanes_of(name))] for name, x in ((f"A_K{k}", left.T.flatten()), (f"B_K{k}", right.flatten()))]
    given = torch.zeros(32, 10, dtype=torch.int32)
    given[:, : k // 4], given[:, 4 : 4 + k // 8] = (x.contiguous().view(torch.int32) for x in held)
    sums = torch.from_numpy(lanes_of("C_ANY"))
    given[:, 6:] = total.T.flatten()[sums].view(torch.int32)
    got = run("products", given.numpy(), 128, 2 * (dtype == torch.bfloat16) + k // 16).view(np.float32)
    want = (left.double() @ right.double() + total).T.flatten()[sums]
    torch.testing.assert_close(torch.from_numpy(got.copy()).view(32, 4).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded_to_where_cutlass_expects_them(count, transposed):
    elements = GENERATOR.permutation(256).astype(np.uint16).reshape(4, 64)
    got = run("matrices", elements, 128, {1: 0, 2: 1, 4: 2}[count] + 3 * transposed).view(np.uint16).reshape(32, 4, 2)
    lanes = lanes_of("LOADED_TRANSPOSED" if transposed else "LOADED")
    for matrix in range(4):
        np.testing.assert_array_equal(got[:, matrix], elements[matrix][lanes] if matrix < count else np.zeros((32, 2)))


@pytest.mark.parametrize("pending", [0, 1, 2])
def test_copies_arrive_when_they_are_waited_for(pending):
    given = GENERATOR.integers(0, 2**31, (3, 64, 4), np.uint32)
    got = run("copies", given, 192, amount=pending, threads=64).reshape(3, 64)
    for group in range(3):
        there = np.where(np.arange(64) % 4 == group, 0, given[group, :, 1])
        np.testing.assert_array_equal(got[group], there if group < 3 - pending else 0xFFFFFFFF)


def test_no_compiler_moves_what_lanes_do_together():
    text = (KERNELS / "intrinsics.cuh").read_text()
    found = re.findall(r'\basm( volatile)?\("((?:\w+\.)+(?:sync|async)[.\w]*)', text)
    assert {name.split(".")[0] for _, name in found} == {"mma", "ldmatrix", "cp"}
    assert [name for volatile, name in found if not volatile] == []


@pytest.mark.parametrize(
    ("number", "storage"),
    [
        pytest.param(number, storage, marks=[] if (number, storage) in {(52, 0), (75, 1), (90, 2)} else pytest.mark.slow)
        for number in (52, 61, 70, 75, 80, 90, 120)
        for storage in (0, 1, 2)
    ],
)
def test_cuda_has_these_instructions_too(number, storage):
    pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    texts = {path.name: path.read_text() for path in (SHIM / "instructions.cu", *KERNELS.glob("*.cuh"))}
    macros = (f"-D{name}" for name in ("THREADS=64", "BLOCKS=1", f"STORAGE={storage}"))
    code, log = compiled("instructions.cu", (f"--gpu-architecture=sm_{number}", *OPTIONS, *macros), texts)
    assert code.startswith(b"\x7fELF")
    assert log.count(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 4
