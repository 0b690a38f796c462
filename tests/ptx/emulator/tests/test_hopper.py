"""Instructions of sm_90a in the emulator: products by warpgroups, and the barriers that copies and warps meet at."""

import re
import shutil
import subprocess
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx.emulator import Emulator, Options, PTXError

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"
ROWS, STEPS, DEPTH, HALF, CHUNK = 64, 4, 16, 2, 8
"""Rows of A, products of a sum, columns of A in each; bytes of an element, elements of 16 bytes."""
WIDTHS = {0: 1, 3: 2, 2: 4, 1: 8}
"""Chunks that are swizzled, by the number of a mode in matrix descriptors."""
B_AT = ROWS * STEPS * DEPTH * HALF
MOST_COLUMNS = 256


def place(mode: int, is_transposed: bool, size: int, mn: Any, k: Any) -> Any:
    """Return bytes as CUTLASS places a matrix: tile_to_shape(Layout_K_*_Atom or Layout_MN_*_Atom of half_t, (size, 64)).

    Atoms are (8, 8 W):(8 W, 1) or (8 W, 8):(1, 8 W), swizzled by Swizzle<log2(W), 4, 3>, one below the other first.
    """
    width = WIDTHS[mode] * CHUNK
    rows, columns = (width, 8) if is_transposed else (8, width)
    within = mn % rows + k % columns * width if is_transposed else mn % rows * width + k % columns
    at = HALF * (within + 8 * width * (mn // rows + k // columns * -(-size // rows)))
    return at ^ (at >> 7 & WIDTHS[mode] - 1) << 4


def descriptor(start: int, mode: int, is_transposed: bool, size: int, step: int) -> np.uint64:
    """Return what make_gmma_desc of CUTLASS makes of the columns of a step."""
    along_k, along_mn = (int(place(mode, is_transposed, size, *one)) for one in ((0, 8), (8, 0)))
    leading, stride = along_k, along_mn
    if is_transposed and mode:
        leading, stride = int(place(mode, True, size, WIDTHS[mode] * CHUNK, 0)), along_k
    start += int(place(mode, is_transposed, size, 0, DEPTH * step))
    return np.uint64(start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62)


def fragment(columns: int) -> tuple[Any, Any]:
    """Return rows and columns by thread and value: CLayout_64xN of CUTLASS, of which ALayout_64x16 is one."""
    thread, value = np.arange(128)[:, None], np.arange(columns // 2)[None]
    at = thread % 4 * 128 + thread // 4 % 8 + thread // 32 * 16 + value % 2 * 64 + value // 2 % 2 * 8 + value // 4 * 512
    return at % ROWS, at // ROWS


def product_text(columns: int, kind: str, in_registers: bool, transposed: tuple[int, int], sign: int) -> str:
    """Write a kernel of one warpgroup that copies an image to shared memory and multiplies, in four steps."""
    sums = ", ".join(f"%f{i}" for i in range(columns // 2))
    multiplied = []
    for step in range(STEPS):
        left = f"{{{', '.join(f'%r{10 + 4 * step + i}' for i in range(4))}}}" if in_registers else f"%rd{10 + step}"
        flags = ", ".join(map(str, (sign, -1, *(() if in_registers else transposed[:1]), transposed[1])))
        opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
        multiplied.append(f"{opcode} {{{sums}}}, {left}, %rd{20 + step}, %p{1 + (step > 0)}, {flags};")
    return f"""{HEAD}.visible .entry products(.param .u64 image, .param .u64 left, .param .u64 out, .param .align 8 .b8 given[64])
.maxntid 128, 1, 1
{{
    .reg .pred %p<4>;
    .reg .b32 %r<32>;
    .reg .b64 %rd<32>;
    .reg .f32 %f<128>;
    .shared .align 1024 .b8 x[{B_AT + MOST_COLUMNS * STEPS * DEPTH * HALF}];
    ld.param.u64 %rd1, [image];
    ld.param.u64 %rd2, [left];
    ld.param.u64 %rd3, [out];
    {" ".join(f"ld.param.u64 %rd{10 * (1 + i // STEPS) + i % STEPS}, [given+{8 * i}];" for i in range(2 * STEPS))}
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 4;
    setp.ne.u32 %p1, %r1, %r1;
    setp.eq.u32 %p2, %r1, %r1;
$COPY:
    cvt.u64.u32 %rd4, %r2;
    add.s64 %rd4, %rd4, %rd1;
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd4];
    mov.u32 %r3, x;
    add.s32 %r3, %r3, %r2;
    st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
    add.s32 %r2, %r2, 2048;
    setp.lt.u32 %p3, %r2, {B_AT + MOST_COLUMNS * STEPS * DEPTH * HALF};
    @%p3 bra $COPY;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mul.wide.u32 %rd4, %r1, {8 * STEPS * HALF};
    add.s64 %rd4, %rd4, %rd2;
    {" ".join(f"ld.global.u32 %r{10 + i}, [%rd4+{4 * i}];" for i in range(4 * STEPS))}
    wgmma.fence.sync.aligned;
    {" ".join(multiplied)}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %rd5, %r1, {2 * columns};
    add.s64 %rd3, %rd3, %rd5;
    {" ".join(f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(columns // 2))}
    ret;
}}
"""


def halves(numbers: Any, kind: str) -> Any:
    """Return the bits of small whole numbers as halves."""
    return numbers.astype(np.float16).view(np.uint16) if kind == "f16" else (numbers.astype(np.float32).view(np.uint32) >> 16)


PRODUCTS = [
    (32, "f16", False, (0, 0), 1),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            (8, "bf16", False, (0, 0), -1),
            (64, "f16", False, (1, 1), 1),
            (72, "bf16", False, (1, 0), 1),
            (128, "bf16", True, (0, 1), -1),
            (176, "f16", True, (0, 0), 1),
            (256, "bf16", False, (0, 1), 1),
        )
    ),
]


@needs_gcc
@pytest.mark.parametrize(("columns", "kind", "in_registers", "transposed", "sign"), PRODUCTS)
def test_products_of_a_warpgroup_are_right(columns, kind, in_registers, transposed, sign):
    """With operands as CUTLASS places them, in all modes of swizzling. Whole numbers make every sum exact."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (size, STEPS * DEPTH)) for size in (ROWS, columns))
    rows, values = fragment(DEPTH)
    left = np.concatenate([halves(a, kind)[rows, DEPTH * step + values] for step in range(STEPS)], 1).astype(np.uint16)
    text, emulator = product_text(columns, kind, in_registers, transposed, sign), Emulator()
    for mode in WIDTHS:
        image = np.full((B_AT + MOST_COLUMNS * STEPS * DEPTH * HALF) // HALF, 0x7FFF, np.uint16)
        given = []
        for matrix, start, is_transposed in ((a, 0, transposed[0]), (b, B_AT, transposed[1])):
            mn, k = np.indices(matrix.shape)
            image[(start + place(mode, bool(is_transposed), len(matrix), mn, k)) // HALF] = halves(matrix, kind)
            given += [descriptor(start, mode, bool(is_transposed), len(matrix), step) for step in range(STEPS)]
        out = np.zeros((128, columns // 2), np.float32)
        emulator.launch(text, [image, left, out, np.array(given).tobytes()], blocks=1, threads=128)
        assert np.array_equal(out, -sign * (a @ b.T)[fragment(columns)]), mode


TILES = 5
PIPELINE = f"""{HEAD}.visible .entry pipeline(.param .u64 left, .param .u64 right, .param .u64 out)
.maxntid 384, 1, 1
.minnctapersm 1
{{
    .reg .pred %p<8>;
    .reg .b32 %r<32>;
    .reg .b64 %rd<16>;
    .reg .f32 %f<16>;
    .shared .align 1024 .b8 x[6144]; // mbarriers of two slots: full, empty; A; two slots of B
    ld.param.u64 %rd1, [left];
    ld.param.u64 %rd2, [right];
    ld.param.u64 %rd3, [out];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, x;
    mov.u32 %r3, 0;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra $MADE;
    mbarrier.init.shared::cta.b64 [%r2], 128;
    mbarrier.init.shared::cta.b64 [%r2+8], 128;
    mbarrier.init.shared::cta.b64 [%r2+16], 1;
    mbarrier.init.shared::cta.b64 [%r2+24], 1;
    fence.mbarrier_init.release.cluster;
$MADE:
    bar.sync 0;
    setp.ge.u32 %p2, %r1, 256;
    @%p2 bra $END;
    and.b32 %r4, %r1, 127;
    shl.b32 %r5, %r4, 4;
    setp.ge.u32 %p2, %r1, 128;
    @%p2 bra $CONSUMER;
    setmaxnreg.dec.sync.aligned.u32 56;
    setp.lt.u32 %p3, %r1, 64;
    cvt.u64.u32 %rd4, %r5;
    add.s64 %rd4, %rd4, %rd2;
$PRODUCE:
    and.b32 %r6, %r3, 1;
    shl.b32 %r7, %r6, 3;
    add.s32 %r7, %r7, %r2; // full
    shr.u32 %r8, %r3, 1;
    and.b32 %r8, %r8, 1;
    xor.b32 %r9, %r8, 1;
$EMPTY:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r7+16], %r9;
    @!%p4 bra $EMPTY;
    shl.b32 %r10, %r6, 10;
    add.s32 %r10, %r10, %r2;
    add.s32 %r10, %r10, %r5;
    @%p3 cp.async.cg.shared.global [%r10+4096], [%rd4], 16;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r7];
    add.s64 %rd4, %rd4, 1024;
    add.s32 %r3, %r3, 1;
    setp.lt.u32 %p5, %r3, {TILES};
    @%p5 bra $PRODUCE;
    bra $END;
$CONSUMER:
    setmaxnreg.inc.sync.aligned.u32 256;
    cvt.u64.u32 %rd4, %r5;
    add.s64 %rd4, %rd4, %rd1;
    ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd4];
    add.s32 %r6, %r2, %r5;
    st.shared.v4.u32 [%r6+1024], {{%r10, %r11, %r12, %r13}};
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
    {" ".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(16))}
    setp.eq.u32 %p3, %r1, 128;
$CONSUME:
    and.b32 %r6, %r3, 1;
    shl.b32 %r7, %r6, 3;
    add.s32 %r7, %r7, %r2;
    shr.u32 %r8, %r3, 1;
    and.b32 %r8, %r8, 1;
$FULL:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r7], %r8;
    @!%p4 bra $FULL;
    add.s32 %r9, %r2, 1024;
    shr.u32 %r9, %r9, 4;
    cvt.u64.u32 %rd5, %r9;
    or.b64 %rd5, %rd5, 0x800400000; // A: leading offset 1024, stride 128
    xor.b64 %rd5, %rd5, 0;
    shl.b32 %r9, %r6, 10;
    add.s32 %r9, %r9, %r2;
    add.s32 %r9, %r9, 4096;
    shr.u32 %r9, %r9, 4;
    cvt.u64.u32 %rd6, %r9;
    or.b64 %rd6, %rd6, 0x800200000; // B: leading offset 512, stride 128
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {{{", ".join(f"%f{i}" for i in range(16))}}}, %rd5, %rd6, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    @%p3 mbarrier.arrive.shared::cta.b64 _, [%r7+16];
    add.s32 %r3, %r3, 1;
    setp.lt.u32 %p5, %r3, {TILES};
    @%p5 bra $CONSUME;
    mul.wide.u32 %rd7, %r4, 64;
    add.s64 %rd3, %rd3, %rd7;
    {" ".join(f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(16))}
$END:
    ret;
}}
"""
"""Warpgroups: one brings tiles of B to two slots, one multiplies, one has nothing to do."""


def run_pipeline(text: str, seeds: range = range(3)) -> None:
    """Run the kernel with each way of copies to come. Raises PTXError, and AssertionError for a wrong result."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (ROWS, DEPTH)), rng.integers(-8, 9, (TILES, 32, DEPTH))
    left, right = np.zeros(1024, np.uint16), np.zeros((TILES, 512), np.uint16)
    left[place(0, False, ROWS, *np.indices(a.shape)) // HALF] = halves(a, "f16")
    right[:, place(0, False, 32, *np.indices(b[0].shape)) // HALF] = halves(b, "f16")
    for seed in seeds:
        emulator = Emulator(Options(seed=seed, loops=200_000))
        for _ in range(3):
            out = np.zeros((128, 16), np.float32)
            emulator.launch(text, [left, right, out], blocks=1, threads=384)
            assert np.array_equal(out, (a @ b.sum(0).T)[fragment(32)])


@pytest.mark.parametrize("text", [PIPELINE, product_text(64, "bf16", True, (0, 1), -1)], ids=["pipeline", "product"])
def test_ptxas_takes_these_kernels(text, tmp_path):
    """It knows how many registers they begin with, and lets products run beside each other."""
    try:
        [folder] = find_spec("nvidia.cuda_nvcc").submodule_search_locations
    except (ModuleNotFoundError, AttributeError):
        pytest.skip("nvidia-cuda-nvcc is not installed: make kernels")
    (tmp_path / "kernel.ptx").write_text(text)
    command = [Path(folder, "bin", "ptxas"), "-arch=sm_90a", "-v", "-o", tmp_path / "kernel.cubin", tmp_path / "kernel.ptx"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Performance Loss" not in done.stderr
    assert "setmaxnreg" not in text or "Used 168 registers" in done.stderr


@needs_gcc
def test_a_pipeline_is_right():
    run_pipeline(PIPELINE)


ARRIVE, EMPTY = "@%p3 mbarrier.arrive.shared::cta.b64 _, [%r7+16];", "@!%p4 bra $EMPTY;"
FENCE, COMMIT, WAIT = "fence.proxy.async.shared::cta;", "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
SOME, BITS = "setp.ge.u32 %p6, %r1, 224; @%p6 bra", "xor.b64 %rd5, %rd5, 0"
LACKS, EARLY = (
    "waits for phase 0 of the mbarrier at {}, which lacks {}",
    "under way|race|has not been waited for|before wgmma.wait_group",
)
FAULTS = {
    "wait for an empty slot": (EMPTY, "", EARLY),
    "wait for a full slot": ("@!%p4 bra $FULL;", "", "under way|race"),
    "parity of an empty slot": ("[%r7+16], %r9;", "[%r7+16], %r8;", LACKS.format(16, "1 arrivals and 0 bytes")),
    "parity of a full slot": ("$FULL:", "xor.b32 %r8, %r8, 1;\n$FULL:", "under way|race|lacks"),
    "arrival of copies": ("arrive.noinc.", "arrive.", LACKS.format(0, "128 arrivals")),
    "arrival of a consumer": (ARRIVE, "", LACKS.format(16, "1 arrivals")),
    "number of arrivals": (ARRIVE, ARRIVE.removeprefix("@%p3"), f"1 arrivals at the mbarrier at (16|24), where 0 are|{EARLY}"),
    "number of bytes": (
        ARRIVE,
        f"{ARRIVE.replace('arrive', 'arrive.expect_tx')[:-1]}, 64;"
        "@%p3 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r7+16], 48;",
        LACKS.format(16, "0 arrivals and 16 bytes"),
    ),
    "barrier before use": ("$MADE:\n    bar.sync 0;", "$MADE:", "race: it uses the mbarrier|no mbarrier"),
    "store to an mbarrier": ("$MADE:", "st.shared.u32 [%r2], %r1;\n$MADE:", "which is an mbarrier"),
    "fence of a proxy": (FENCE, "", "without a fence.proxy.async"),
    "fence of another thread": (FENCE, f"setp.eq.u32 %p6, %r1, 128;\n@%p6 {FENCE}", "without a fence.proxy.async"),
    "barrier of a warpgroup": ("bar.sync 1, 128;", "", "race"),
    "threads at a barrier": ("bar.sync 1, 128;", "bar.sync 1, 160;", "waits for a barrier"),
    "fence of registers": ("wgmma.fence.sync.aligned;", "", "no wgmma.fence before it"),
    "fence before a touch": (
        "wgmma.fence.sync.aligned;",
        "wgmma.fence.sync.aligned;\nneg.f32 %f1, %f1;",
        "no wgmma.fence after line",
    ),
    "touch of registers": (COMMIT, f"{COMMIT}\nadd.f32 %f1, %f1, %f1;", "touches a register before wgmma.wait_group"),
    "wait": (WAIT, "", EARLY),
    "one group less": (WAIT, WAIT.replace("0", "1"), EARLY),
    "arrival before the wait": (f"{WAIT}\n    {ARRIVE}", f"{ARRIVE}\n    {WAIT}", "has not been waited for"),
    "commit": (COMMIT, "", EARLY),
    "a warp less": (COMMIT, f"{SOME} $END;\n{COMMIT}", "ends before"),
    "order of instructions": (COMMIT, f"{SOME} $A;\n{COMMIT}\nbra $B;\n$A:\n{COMMIT}\n$B:", "different instructions"),
    "stride of a descriptor": ("0x800200000", "0x1000200000", "wrong|race|under way"),
    "mode of a descriptor": (BITS, f"{BITS}x4000000000000000", "wrong"),
    "base offset of a descriptor": (BITS, f"{BITS}x2000000000000", "where their swizzling repeats"),
    "bits of a descriptor": (BITS, f"{BITS}x4000", "bits that have no meaning"),
    "address of a descriptor": ("%r9, 4096;", "%r9, 8192;", "it has 6144"),
    "number of registers": ("dec.sync.aligned.u32 56", "dec.sync.aligned.u32 60", "60 registers: 24 to 256, a multiple of 8"),
    "sum of registers": ("setmaxnreg.dec.sync.aligned.u32 56;", "", "waits for registers that others free"),
    "fewer registers": ("inc.sync.aligned.u32 256;", "inc.sync.aligned.u32 64;", "inc to 64 of 168 registers"),
}
"""Text that is replaced, what with, and what is then said; `wrong`: the result may also be wrong."""


@pytest.mark.slow
@needs_gcc
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_pipeline_are_noticed(fault):
    old, new, said = FAULTS[fault]
    assert PIPELINE.count(old) == 1
    with pytest.raises((PTXError, AssertionError)) as raised:
        run_pipeline(PIPELINE.replace(old, new), range(8))
    assert "wrong" in said if raised.type is AssertionError else re.search(said, str(raised.value)), raised.value


MEETING = f"""{HEAD}.visible .entry meeting(.param .u64 numbers)
.maxntid 64, 1, 1
{{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    .shared .align 16 .b8 x[1024];
    ld.param.u64 %rd1, [numbers];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 16;
    add.s64 %rd1, %rd1, %rd2;
    mov.u32 %r2, x;
    mov.u32 %r3, 0;
    shl.b32 %r4, %r1, 2;
    add.s32 %r4, %r4, %r2;
    setp.lt.u32 %p1, %r1, 32;
    @!%p1 bra $MADE;
    {{
        .reg .b32 %rx;
        .reg .pred %px, own;
        elect.sync %rx|%px, 0xffffffff;
        @%px mov.u32 %r3, 1;
        setp.eq.u32 own, %r3, 1;
        @own mbarrier.init.shared::cta.b64 [%r2], 32;
    }}
$MADE:
    bar.sync 0, 64;
    shl.b32 %r5, %r1, 4;
    add.s32 %r5, %r5, %r2;
    @%p1 bra $READ;
    st.shared.u32 [%r4+256], %r1;
    cp.async.ca.shared.global [%r5], [%rd1], 16;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2];
    bar.arrive 1, 64;
    bra $END;
$READ:
    bar.sync 1, 64;
    ld.shared.u32 %r6, [%r4+384];
    {{
        .reg .pred P1;
        LAB_WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 P1, [%r2], 0;
        @P1 bra DONE;
        bra LAB_WAIT;
        DONE:
    }}
    ld.shared.u32 %r7, [%r5+512];
    add.u32 %r7, %r7, %r6;
    st.global.u32 [%rd1], %r7;
$END:
    ret;
}}
"""
"""A warp brings to another what it stores and what it copies, with scopes as inline assembly has them."""


LOAD = "ld.shared.u32 %r6, [%r4+384];"


@pytest.mark.slow
@needs_gcc
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"bar.sync 1, 64;": ""}, "race"),
        ({"@P1 bra DONE;": "bra DONE;"}, "under way|race"),
        ({"bar.arrive 1, 64;": "bar.arrive 1, 32;"}, "barrier 1 of (32|64) threads|waits for a barrier"),
        ({"bar.sync 0, 64;": ""}, "no mbarrier|race: it uses the mbarrier"),
        ({"bar.sync 1, 64;": "", LOAD: "", "add.u32 %r7,": f"{LOAD}\nadd.u32 %r7,"}, "race: it reads"),
    ],
)
def test_warps_meet_at_barriers(changes, said):
    """In the last case a store lies before the arrival of copies, which does not show it to who waits for that."""
    text = MEETING
    for old, new in changes.items():
        text = text.replace(old, new)
    with pytest.raises(PTXError, match=said) if said else nullcontext():
        for seed in range(4):
            emulator = Emulator(Options(seed=seed, loops=100_000))
            for _ in range(3):
                numbers = np.arange(256, dtype=np.uint32)
                emulator.launch(text, [numbers], blocks=1, threads=64)
                assert numbers[:128:4].tolist() == [32 + lane + 4 * (32 + lane) for lane in range(32)]
