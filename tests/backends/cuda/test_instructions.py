"""Each instruction that the host shim emulates, against a plain definition; fragments against the tables of the PTX ISA."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.host_compile import KERNELS, SHIM
from helpers.instructions import run
from numpy.typing import NDArray

from dilkit.backends.cuda.compile import OPTIONS, compiled

GENERATOR = np.random.default_rng(5)

SPECIAL = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x387FFFFF, 0x33000000, 0x33000001, 0x477FEFFF, 0x477FF000], np.uint32
)
FLOATS = np.concatenate(
    [SPECIAL, GENERATOR.integers(0, 2**32, 100_000, np.uint32), (np.arange(0x3300, 0x4800) << 12).astype(np.uint32) << 4]
)
FLOATS = FLOATS[~np.isnan(FLOATS.view(np.float32))]


def each(words: NDArray[np.uint32], what: int, amount: int = 0) -> NDArray[np.uint32]:
    """`words`, each of another thread, through the kernel `words`."""
    blocks = -(-len(words) // 64)
    given = np.concatenate([words, np.zeros(blocks * 64 - len(words), np.uint32)])
    return run("words", given, blocks * 64, what, amount, 64, blocks)[: len(words)]


@pytest.mark.parametrize(("what", "dtype"), [(0, torch.float16), (1, torch.bfloat16)])
def test_every_number_of_two_bytes_becomes_a_float(what: int, dtype: torch.dtype) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    want = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
    np.testing.assert_array_equal(each(bits.astype(np.uint32), what).view(np.float32), want)


@pytest.mark.parametrize(("what", "dtype"), [(2, torch.float16), (3, torch.bfloat16)])
def test_floats_are_rounded_to_nearest_even(what: int, dtype: torch.dtype) -> None:
    want = torch.from_numpy(FLOATS.view(np.float32)).to(dtype).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(each(FLOATS, what), want)
    packed = each(FLOATS, what + 2)
    np.testing.assert_array_equal(packed & 0xFFFF, want)
    np.testing.assert_array_equal(packed >> 16, want ^ 0x8000)


@pytest.mark.parametrize("what", [2, 3])
def test_what_is_no_number_stays_none(what: int) -> None:
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    assert (each(nan, what) == 0x7FFF).all()


def test_powers_of_two() -> None:
    x = np.array([-np.inf, -200, -1.5, 0, 0.25, 127, np.inf, np.nan], np.float32)
    np.testing.assert_allclose(each(x.view(np.uint32), 6).view(np.float32), np.exp2(x), rtol=3e-7)


SHUFFLES = {
    7: lambda lane, amount: lane * amount % 32,
    8: lambda lane, amount: lane ^ amount,
    9: lambda lane, amount: np.where(lane >= amount, lane - amount, lane),
    10: lambda lane, amount: np.where(lane + amount < 32, lane + amount, lane),
    11: lambda lane, amount: (lane // 2 + amount) % 32,
    12: lambda lane, amount: lane ^ amount,
}


@pytest.mark.parametrize("amount", [0, 1, 3, 16, 31])
@pytest.mark.parametrize("what", SHUFFLES)
def test_shuffles(what: int, amount: int) -> None:
    given = GENERATOR.integers(0, 2**32, 256, np.uint32)
    lanes = SHUFFLES[what](np.arange(32), amount)
    np.testing.assert_array_equal(each(given, what, amount), given.reshape(-1, 32)[:, lanes].reshape(-1))


def test_ballot() -> None:
    given = GENERATOR.integers(0, 2**32, 128, np.uint32)
    want = [sum(int(word & 1) << lane for lane, word in enumerate(warp)) for warp in given.reshape(-1, 32)]
    np.testing.assert_array_equal(each(given, 13), np.repeat(np.array(want, np.uint32), 32))


@pytest.mark.parametrize(("what", "of_warp"), [(14, np.min), (15, np.max)])
def test_least_and_most_of_a_warp(what: int, of_warp: Any) -> None:
    given = GENERATOR.integers(0, 2**32, 128, np.uint32)
    want = of_warp(given.view(np.int32).reshape(-1, 32), axis=1).astype(np.int32).view(np.uint32)
    np.testing.assert_array_equal(each(given, what), np.repeat(want, 32))


def test_sum_of_a_warp_and_bits_of_a_word() -> None:
    given = GENERATOR.integers(0, 2**32, 128, np.uint32)
    sums = (given & 0xFFFFFF).reshape(-1, 32).sum(axis=1, dtype=np.uint32)
    np.testing.assert_array_equal(each(given, 16), np.repeat(sums, 32))
    np.testing.assert_array_equal(each(given, 17), [int(word).bit_count() for word in given])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_lie_in_registers_as_ptx_says(count: int, transposed: bool) -> None:
    elements = GENERATOR.permutation(256).astype(np.uint16).reshape(4, 8, 8)
    got = run("matrices", elements, 128, {1: 0, 2: 1, 4: 2}[count] + 3 * transposed).view(np.uint16).reshape(32, 4, 2)
    for lane in range(32):
        for matrix in range(4):
            row, columns = lane // 4, (lane % 4 * 2, lane % 4 * 2 + 1)
            own = elements[matrix].T if transposed else elements[matrix]
            want = own[row, columns] if matrix < count else (0, 0)
            np.testing.assert_array_equal(got[lane, matrix], want)


def left_place(lane: int, i: int) -> tuple[int, int]:
    """Row and column of element a_i of the 16 x 16 (or 16 x 8) matrix: PTX ISA, matrix fragments for mma.m16n8k16."""
    group, of_group = lane >> 2, lane % 4
    return group if i % 4 < 2 else group + 8, of_group * 2 + (i & 1) + (8 if i >= 4 else 0)


def right_place(lane: int, i: int) -> tuple[int, int]:
    """Row and column of element b_i of the k x 8 matrix."""
    return (lane % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), lane >> 2


def sum_place(lane: int, i: int) -> tuple[int, int]:
    """Row and column of element c_i of the 16 x 8 matrix."""
    return (lane >> 2) + (0 if i < 2 else 8), (lane % 4) * 2 + (i & 1)


def fragments(matrix: torch.Tensor, place: Any, count: int) -> torch.Tensor:
    """What each lane holds of `matrix`: 32 x count."""
    return torch.stack([torch.stack([matrix[place(lane, i)] for i in range(count)]) for lane in range(32)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [8, 16])
def test_products_of_fragments(dtype: torch.dtype, k: int) -> None:
    torch.manual_seed(k)
    left, right, total = torch.randn(16, k).to(dtype), torch.randn(k, 8).to(dtype), torch.randn(16, 8)
    given = torch.zeros(32, 10, dtype=torch.int32)
    given[:, : k // 4] = fragments(left, left_place, k // 2).view(torch.int32)
    given[:, 4 : 4 + k // 8] = fragments(right, right_place, k // 4).view(torch.int32)
    given[:, 6:] = fragments(total, sum_place, 4).view(torch.int32)
    got = run("products", given.numpy(), 128, 2 * (dtype == torch.bfloat16) + k // 16)
    want = left.double() @ right.double() + total
    found = torch.from_numpy(got.view(np.float32).copy()).view(32, 4).double()
    torch.testing.assert_close(found, fragments(want, sum_place, 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pending", [0, 1, 2])
def test_copies_arrive_when_they_are_waited_for(pending: int) -> None:
    given = GENERATOR.integers(0, 2**31, (3, 64, 4), np.uint32)
    got = run("copies", given, 192, amount=pending, threads=64).reshape(3, 64)
    for group in range(3):
        there = np.where(np.arange(64) % 4 == group, 0, given[group, :, 1])
        np.testing.assert_array_equal(got[group], there if group < 3 - pending else 0xFFFFFFFF)


def test_no_compiler_moves_what_lanes_do_together() -> None:
    """Nor a copy that others wait for: into a branch, for instance, that some lanes do not take."""
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
def test_cuda_has_every_instruction_that_the_shim_has(number: int, storage: int) -> None:
    pytest.importorskip("cupy", reason="cupy is not installed: make kernels")
    texts = {path.name: path.read_text() for path in (SHIM / "instructions.cu", *KERNELS.glob("*.cuh"))}
    macros = (f"-D{name}" for name in ("THREADS=64", "BLOCKS=1", f"STORAGE={storage}"))
    code, log = compiled("instructions.cu", (f"--gpu-architecture=sm_{number}", *OPTIONS, *macros), texts)
    assert code.startswith(b"\x7fELF")
    assert log.count(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 4
