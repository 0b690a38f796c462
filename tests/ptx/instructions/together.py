"""What threads do together: branches apart, meetings, shuffles, and products and loads of matrices."""

from __future__ import annotations

from ptx.instructions.rule import Rule, Use, value
from ptx.operands import address, parts, read
from ptx.parse import UnknownPTX

CONTROL, SYNC = "Control Flow Instructions", "Parallel Synchronization and Communication Instructions"
MATRIX = "Warp Level Matrix Multiply-Accumulate Instructions"
REGISTERS = {"8": (2, 1), "16": (4, 2)}
"""Of A and of B in a product, by depth."""


def branch(use: Use) -> str:
    use.wants(1)
    label = use.operands[0].lstrip("$")
    if label not in use.names.labels:
        raise UnknownPTX(f"label {label!r}")
    again = f"loop(1, {use.line}); " if use.names.labels[label] <= use.line else ""
    return f"{again}goto {label};"


def shuffle(use: Use) -> str:
    use.wants(5)
    to, _, is_chosen = use.operands[0].partition("|")
    given = ", ".join(use.read(number, "u32") for number in range(1, 5))
    moved = use.write(to, "b32", f"shuffle(SHUFFLE_{use.named['mode']}, {given}, {use.line})")
    return moved + (" " + use.write(is_chosen, "pred", "machine.current->is_chosen") if is_chosen else "")


def load_matrices(use: Use) -> str:
    use.wants(2)
    count, registers = int(use.named["count"]), parts(use.operands[0])
    if count != len(registers):
        raise UnknownPTX(f"{use.instruction.opcode} to {len(registers)} registers")
    got = " ".join(use.write(register, "b32", f"out[{at}]") for at, register in enumerate(registers))
    is_transposed = int(use.named["form"] is not None)
    called = f"ldmatrix({count}, {is_transposed}, {address(use.operands[1], use.names)}, {use.line})"
    return f"{{ const uint32_t *out = {called}; {got} }}"


def store_matrices(use: Use) -> str:
    use.wants(2)
    count, registers = int(use.named["count"]), parts(use.operands[1])
    if count != len(registers):
        raise UnknownPTX(f"{use.instruction.opcode} of {len(registers)} registers")
    given = [address(use.operands[0], use.names), *(read(register, "b32", use.names) for register in registers)]
    put = " ".join(f"in[{at}] = {x};" for at, x in enumerate(given))
    is_transposed = int(use.named["form"] is not None)
    return f"{{ uint32_t *in = machine.current->in; {put} stmatrix({count}, {is_transposed}, {use.line}); }}"


def multiply(use: Use) -> str:
    use.wants(4)
    result, *factors = map(parts, use.operands)
    depth = use.named["depth"]
    if (len(result), *map(len, factors)) != (4, *REGISTERS[depth], 4):
        raise UnknownPTX(f"{use.instruction.opcode} of other registers")
    given = [read(register, "b32", use.names) for factor in factors for register in factor]
    put = " ".join(f"in[{at}] = {x};" for at, x in enumerate(given))
    got = " ".join(use.write(register, "f32", f"as_float(out[{at}])") for at, register in enumerate(result))
    called = f"mma({depth}, {int(use.named['kind'] == 'bf16')}, {use.line})"
    return f"{{ uint32_t *in = machine.current->in; {put} const uint32_t *out = {called}; {got} }}"


RULES = (
    Rule(r"bra(?:\.uni)?", f"{CONTROL}: bra", "Goes on at a label; .uni: as all threads of the warp that are there.", branch),
    Rule(r"ret", f"{CONTROL}: ret", "Of a kernel: the thread ends.", lambda use: "return;"),
    Rule(
        r"bar\.sync",
        f"{SYNC}: bar, barrier",
        "Waits for all threads of the block, those of a warp at the same one; what they did to memory before it is there for all "
        "after it.",
        lambda use: f"barrier({use.read(0, 'u32')}, {use.line});",
    ),
    Rule(
        r"bar\.warp\.sync",
        f"{SYNC}: bar.warp.sync",
        "Waits for the threads of the membermask; what they did to memory before it is there for them after it.",
        lambda use: f"warp_value(MEET, 0, {use.read(0, 'u32')}, {use.line});",
    ),
    Rule(
        r"membar\.gl",
        f"{SYNC}: membar/fence",
        "As fence.sc.gpu: what the thread has seen and done before it is there, on the device, before what it does after it.",
        lambda use: "fence();",
    ),
    Rule(
        r"shfl\.sync\.(?P<mode>bfly|idx|up|down)\.b32",
        "Data Movement and Conversion Instructions: shfl.sync",
        "A register of the lane that is as far from this one as b says, within the segment that c says; else the own one.",
        shuffle,
    ),
    value(
        r"vote\.sync\.ballot\.b32",
        f"{SYNC}: vote.sync",
        ".ballot: the predicates of all lanes, a bit each.",
        "b32 pred u32",
        "warp_value(BALLOT, {0}, {1}, {line})",
    ),
    value(
        r"redux\.sync\.(?P<operation>add|min|max)\.s32",
        f"{SYNC}: redux.sync",
        "The sum, or the least or greatest, over all lanes, in each of them.",
        "s32 s32 u32",
        "warp_value(REDUCE_{operation}, {0}, {1}, {line})",
    ),
    Rule(
        r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<form>\.trans)?\.shared\.b16",
        f"{MATRIX}: Warp-level matrix load instruction: ldmatrix",
        "Matrices of 8 rows of 16 bytes, whose addresses 8 lanes each give; a register of a lane has two neighbours of a row, or "
        "with .trans of a column.",
        load_matrices,
    ),
    Rule(
        r"stmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<form>\.trans)?\.shared\.b16",
        f"{MATRIX}: stmatrix",
        "The registers of ldmatrix to the rows from which it would load them.",
        store_matrices,
    ),
    Rule(
        r"mma\.sync\.aligned\.m16n8k(?P<depth>8|16)\.row\.col\.f32\.(?P<kind>f16|bf16)\.(?P=kind)\.f32",
        f"{MATRIX}: Multiply-and-Accumulate Instruction: mma",
        "D = A B + C. Products are in fp32 at least, so exact, and so are sums; their order and rounding are not said.",
        multiply,
    ),
)
