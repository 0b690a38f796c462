"""The emulator by itself."""

import doctest
import re
import shutil
from itertools import product
from typing import Any

import numpy as np
import pytest
from ptx.emulator import MACHINE, Emulator, NotModelled, Options, PTXError, Rounding, UnknownPTX, emulator
from ptx.emulator.emulator import FIELDS
from ptx.emulator.library import translate
from ptx.emulator.parse import Array, Entry, Instruction, Label, Parameter, entry_of, parse, split

PACKAGE = MACHINE.parent
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

TEXT = """
.version 8.8
.target sm_80
.address_size 64

.visible .entry f(
	.param .align 8 .b8 f_param_0[16]
)
.maxntid 32, 1, 1
{{
	.reg .pred 	%p<2>;
	.reg .b16 	%rs<4>;
	.reg .f32 	%f<4>;
	.reg .b32 	%r<8>;
	.reg .b64 	%rd<4>;
	// demoted variable
	.shared .align 16 .b8 x[128];

	mov.b64 	%rd1, f_param_0;
	ld.param.u64 	%rd2, [%rd1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd2, %rd2, %rd3;
	ld.global.u32 	%r2, [%rd2];
{body}
	st.global.u32 	[%rd2], %r2;
	ret;

}}
"""


def run(body: str, numbers: np.ndarray[Any, Any], **options: Any) -> None:
    """Run a kernel that changes 32 numbers, `%r2` of each thread `%r1`."""
    address = np.array([numbers.ctypes.data, 0], np.uint64).tobytes()
    memory = [(numbers.ctypes.data, numbers.nbytes, "numbers", False)]
    Emulator(Options(loops=100_000, **options)).launch(TEXT.format(body=body), [address], blocks=1, threads=32, memory=memory)


@needs_gcc
def test_the_example_is_right():
    assert doctest.testmod(emulator) == (0, 6)


@needs_gcc
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "f has 1 parameters: 0 arguments were given"),
        ([np.uint64(0)], "f_param_0 has 16 bytes, and its argument 8"),
        ([np.zeros((2, 2))[:, 0]], "strides (16,) is not contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Emulator().launch(TEXT.format(body=""), arguments, blocks=1, threads=32)


def test_a_kernel_without_a_model_is_refused():
    emulated = Emulator()
    with pytest.raises(NotModelled, match="f for sm_80 has tcgen05, which the emulator does not model"):
        emulated.launch(TEXT.format(body="tcgen05.wait::ld.sync.aligned;"), [bytes(16)], blocks=1, threads=32)
    assert emulated.not_modelled.startswith("f for sm_80")


def test_a_kernel_is_parsed():
    text = TEXT.format(body="$L: @!%p1 bra $L;\n{ .reg .b16 t; mov.b32 {t, %rs1}, %r2; }")
    kernel = parse(text)
    assert entry_of(text) == Entry("f", "sm_80", kernel.parameters)
    assert kernel.parameters == (Parameter("f_param_0", 0, 16),)
    assert kernel.arrays == (Array("x", 16, 128),)
    assert kernel.registers["own1_t"] == "b16"
    assert kernel.body[6:9] == (
        Label(25, "L"),
        Instruction(25, "!p1", "bra", ("$L",)),
        Instruction(26, "", "mov.b32", ("{%own1_t, %rs1}", "%r2")),
    )
    assert split("{%f1, %f2}, [%rd1+4], 3") == ("{%f1, %f2}", "[%rd1+4]", "3")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("add.sat.s32 %r2, %r2, %r1;", "an unknown instruction"),
        ("add.s32 %r2, %r2;", "2 operands"),
        ("add.s32 %r2, %r2, %r99;", "operand '%r99'"),
        (".local .align 4 .b8 y[4];", ".local"),
        ("bra $nowhere;", "label 'nowhere'"),
        ("ld.shared.v2.u32 {%r1, %r2, %r3}, [x];", "3 registers"),
        ("atom.global.add.b32 %r2, [%rd2], 1;", "an unknown instruction"),
    ],
)
def test_what_has_no_meaning_is_refused(body, what):
    with pytest.raises(UnknownPTX, match=re.escape(what)):
        translate(TEXT.format(body=body))


def test_counts_are_named_in_the_order_of_the_machine():
    names = re.search(r"enum \{\n(.*?),\n    COUNTS\n\};", (MACHINE / "thread.h").read_text(), re.DOTALL)
    assert names is not None
    assert tuple(name.strip().lower() for name in names[1].split(",")) == FIELDS


MEANINGS = {
    "mov.u32 %r2, %r7;": lambda x, t: 0xDEADBEEF,
    "cvt.u32.u16 %r2, %rs3;": lambda x, t: 0xDEAD,
    "mov.b32 %r2, %f3;": lambda x, t: 0x7FC00000,
    "selp.b32 %r2, 5, 6, %p1;": lambda x, t: 5,
    "sub.s32 %r2, %r1, %r2;": lambda x, t: t - x,
    "mul.hi.u32 %r2, %r2, 0xF0000000;": lambda x, t: x * 0xF0000000 >> 32,
    "shl.b32 %r2, %r2, %r1; shr.s32 %r2, %r2, 40;": lambda x, t: -(x << t >> 31 & 1),
    "bfe.u32 %r2, %r2, %r1, 9;": lambda x, t: x >> t & 511,
    "bfe.s32 %r2, %r2, 8, 8;": lambda x, t: ((x >> 8 & 255) ^ 128) - 128,
    "bfi.b32 %r2, %r1, %r2, 28, 9;": lambda x, t: x & 0xFFFFFFF | t << 28,
    "prmt.b32 %r2, %r2, %r1, 0x40B1;": lambda x, t: (t << 24) | (x & 255) << 16 | (255 * (x >> 31)) << 8 | x >> 8 & 255,
    "rem.s32 %r2, -7, 4;": lambda x, t: -3,
    "setp.lt.s32 %p1, %r2, 0; selp.b32 %r2, 5, 6, %p1;": lambda x, t: 5 if x >> 31 else 6,
    "mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r2, {%rs2, %rs1};": lambda x, t: x >> 16 | x << 16,
    "cvt.u16.u32 %rs1, %r2; cvt.s16.s8 %rs1, %rs1; cvt.s32.s16 %r2, %rs1;": lambda x, t: ((x & 255) ^ 128) - 128,
    "shfl.sync.bfly.b32 %r2|%p1, %r1, 5, 31, -1;": lambda x, t: t ^ 5,
    "shfl.sync.down.b32 %r2|%p1, %r1, 3, 0x181F, -1;": lambda x, t: t + 3 if t % 8 < 5 else t,
    "shfl.sync.up.b32 %r2|%p1, %r1, 3, 0x1800, -1;": lambda x, t: t - 3 if t % 8 > 2 else t,
    "shfl.sync.idx.b32 %r2|%p1, %r1, 2, 0x181F, -1;": lambda x, t: t // 8 * 8 + 2,
    "redux.sync.add.s32 %r2, %r1, -1;": lambda x, t: 496,
    "div.full.f32 %f1, 0f41800000, 0f40800000; cvt.rzi.s32.f32 %r2, %f1;": lambda x, t: 4,
    "div.approx.f32 %f1, 0f41800000, 0f7E800000; setp.eq.f32 %p1, %f1, 0f00000000; selp.b32 %r2, 1, 2, %p1;": lambda x, t: 2,
    "div.approx.f32 %f1, 0f41800000, 0f7E800001; setp.eq.f32 %p1, %f1, 0f00000000; selp.b32 %r2, 1, 2, %p1;": lambda x, t: 1,
    "fma.rn.ftz.f32 %r2, 0f00000001, 0f7F000000, 0f40000000;": lambda x, t: 0x40000000,
    "ex2.approx.f32 %r2, 0fC3040000;": lambda x, t: 1 << 17,
    "ex2.approx.ftz.f32 %r2, 0fC3040000;": lambda x, t: 0,
    "sqrt.approx.ftz.f32 %f1, 0f41800000; cvt.rzi.s32.f32 %r2, %f1;": lambda x, t: 4,
    "cvt.rzi.s16.f32 %rs1, 0fC7800000; cvt.s32.s16 %r2, %rs1;": lambda x, t: -32768,
    "mov.b32 %f1, %r2; setp.num.f32 %p1, %f1, %f1; selp.b32 %r2, 1, 0, %p1;": lambda x, t: (x << 1 & 0xFFFFFFFF) <= 0xFF000000,
    "mov.u16 %rs1, 0x7C01; setp.num.f16 %p1, %rs1, %rs1; selp.b32 %r2, 1, 0, %p1;": lambda x, t: 0,
    "mov.u16 %rs1, 0x7C00; setp.num.bf16 %p1, %rs1, %rs1; selp.b32 %r2, 1, 0, %p1;": lambda x, t: 1,
    "mov.u32 %r2, %tid.y; mov.u32 %r3, %ntid.x; add.s32 %r2, %r2, %r3;": lambda x, t: 32,
    "st.shared.u32 [x], 7;\nbar.sync 0;\nld.shared.u32 %r2, [x];": lambda x, t: 7,
    "mov.u32 %r3, x; shl.b32 %r4, %r1, 2; add.s32 %r3, %r3, %r4; cp.async.ca.shared.global [%r3], [%rd2], 4, 2;"
    "cp.async.commit_group; cp.async.wait_group 0; ld.shared.u32 %r2, [%r3];": lambda x, t: x & 0xFFFF,
    "mov.u32 %r3, x; shl.b32 %r4, %r1, 4; add.s32 %r3, %r3, %r4; mov.u32 %r5, %r1;\n"
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r5};\nbar.sync 0;\n"
    "mov.u32 %r3, x; shl.b32 %r4, %r1, 2; add.s32 %r3, %r3, %r4; ld.shared.u32 %r2, [%r3];": lambda x, t: t,
    "mov.u32 %r3, x; setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r3], 33;\nbar.sync 0;\n"
    "mbarrier.arrive.noComplete.release.cta.shared.b64 %rd3, [%r3], 1;\nbar.warp.sync -1;\n"
    "@%p1 mbarrier.arrive.shared.b64 _, [%r3];\n$E: mbarrier.test_wait.shared.b64 %p0, [%r3], %rd3; @!%p0 bra $E;\nbar.sync 0;\n"
    "@%p1 mbarrier.inval.shared.b64 [%r3]; @%p1 st.shared.u32 [%r3], 7;\nbar.sync 0;\nld.shared.u32 %r2, [%r3];": lambda x, t: 7,
    "setp.gt.u32 %p1, %r1, 2; vote.sync.ballot.b32 %r2, %p1, -1;": lambda x, t: 0xFFFFFFF8,
}


@pytest.mark.slow
@needs_gcc
@pytest.mark.parametrize("body", MEANINGS)
def test_an_instruction_means_what_it_should(body):
    numbers = np.random.default_rng(0).integers(0, 2**32, 32, dtype=np.uint32)
    expected = [MEANINGS[body](int(x), lane) % 2**32 for lane, x in enumerate(numbers)]
    run(body, numbers)
    assert numbers.tolist() == expected


@pytest.mark.slow
@needs_gcc
def test_the_smallest_number_is_off_by_no_more_than_units():
    """2 units below it are not what follows when its bits are read as a whole number, which is NaN."""
    numbers = np.full(32, 9, np.uint32)
    run("ex2.approx.f32 %r2, 0fC3150000;", numbers, rounding=Rounding(ulps=2))
    assert {*numbers.tolist()} == {0, 1, 2, 3}


BROKEN = {
    "st.shared.u32 [x+126], %r2;": "not aligned",
    "st.shared.u32 [x+128], %r2;": "it has 128",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [x+8], {%r1};": "16 bytes of shared memory at 8: not aligned",
    "st.shared.u32 [x], %r1;": "race: it writes shared memory at 0",
    "setp.eq.u32 %p1, %r1, 4; @%p1 st.shared.u32 [x], %r2;\n@!%p1 st.shared.u32 [x], %r2;": "race: it writes shared memory at 0",
    "st.shared.u32 [x], %r2;\nld.shared.u32 %r2, [x];": "shared memory at 0, which thread",
    "st.global.u32 [%rd2], %r1;\nmov.b64 %rd3, f_param_0; ld.param.u64 %rd3, [%rd3];"
    "ld.global.u32 %r2, [%rd3];": "race: it reads byte",
    "setp.eq.u32 %p1, %r1, 4; @%p1 st.global.u32 [%rd2+4], %r2;": "race: it",
    "st.global.u32 [%rd2+128], %r2;": "no tensor of the launch holds",
    "rem.u32 %r2, %r2, %r1;": "divides by 0",
    "setp.eq.s32 %p1, %r1, 3;\n@%p1 bra $E;\nbar.sync 0;\n$E:": "others have ended",
    "setp.eq.s32 %p1, %r1, 3;\n@%p1 bra $E;\nbar.warp.sync -1;\n$E: bar.warp.sync -1;": "different instructions",
    "setp.eq.s32 %p1, %r1, 3;\n@%p1 bra $E;\nbar.sync 0;\nbra $F;\n$E: bar.sync 0;\n$F:": "different instructions",
    "$E: setp.eq.s32 %p1, %r1, 3; @%p1 bra $E;": "loops for ever",
    "mov.u32 %r3, x; setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [%r3], 32;\nbar.sync 0;\n"
    "mbarrier.arrive.noComplete.shared.b64 %rd3, [%r3], 1;": "completes the phase",
    "mov.u32 %r3, x; cp.async.cg.shared.global [%r3], [%rd1], 8;": "it is of 16 or more",
    "mov.u32 %r3, x; shl.b32 %r4, %r1, 4; add.s32 %r3, %r3, %r4; setp.gt.u32 %p1, %r1, 7; @%p1 bra $E;"
    "mov.u32 %r5, 0; and.b64 %rd3, %rd2, -16; cp.async.cg.shared.global [%r3], [%rd3], 16, %r5;"
    "ld.shared.u32 %r2, [%r3]; $E:": "under way",
}


@pytest.mark.slow
@needs_gcc
@pytest.mark.parametrize("body", BROKEN)
def test_what_is_not_allowed_is_noticed(body):
    with pytest.raises(PTXError, match=re.escape(BROKEN[body])):
        run(body, np.zeros(32, np.uint32))


def table(name: str) -> list[list[int]]:
    text = re.search(rf"{name}\[32\]\[\d+\] = \{{(.*?)\}};", (MACHINE / "layouts.h").read_text(), re.DOTALL)
    assert text is not None
    return [[*map(int, row.split(","))] for row in re.findall(r"\{([^{}]+)\}", text[1])]


def test_lanes_have_what_the_ptx_isa_says():
    """Matrix Fragments for mma.m16n8k8, for mma.m16n8k16 with floating point type, and of ldmatrix; groups are of four lanes."""
    for lane, value in product(range(32), range(8)):
        group, own = divmod(lane, 4)
        row, column = group + 8 * (value // 2 % 2), 2 * own + value % 2 + 8 * (value // 4)
        assert table("A_K16")[lane][value] == row + 16 * column
        if value < 4:
            assert table("A_K8")[lane][value] == table("C_ANY")[lane][value] == row + 16 * column
            assert table("B_K16")[lane][value] == group + 8 * (2 * own + value % 2 + 8 * (value // 2))
        if value < 2:
            assert table("B_K8")[lane][value] == group + 8 * (2 * own + value)
            assert table("LOADED")[lane][value] == 8 * group + 2 * own + value
            assert table("LOADED_TRANSPOSED")[lane][value] == 8 * (2 * own + value) + group
