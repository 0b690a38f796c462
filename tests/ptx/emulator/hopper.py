"""Instructions of sm_90 and sm_90a: barriers in shared memory, and products by four warps, which run beside the threads."""

from __future__ import annotations

from ptx.emulator.parse import UnknownPTX
from ptx.emulator.rules import Rule, Use, address, held, parts, read, variable

SHARED = r"\.shared(?:::cta)?"
ARRIVE = r"mbarrier\.arrive(?P<bytes>\.expect_tx)?(?P<partial>\.noComplete)?(?:\.release\.cta)?" + SHARED + r"\.b64"
WAIT = r"mbarrier\.(?P<kind>try|test)_wait(?P<parity>\.parity)?(?:\.acquire\.cta)?" + SHARED + r"\.b64"
PRODUCT = r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k16\.f32\.(?P<kind>f16|bf16)\.(?P=kind)"
MOST_COLUMNS, OF_A = 256, 4
"""Columns of the widest product, and registers of A in each thread."""


def _at(use: Use, number: int) -> str:
    return address(use.operands[number], use.names)


def arrive(use: Use) -> str:
    use.wants(2, 3)
    number = use.read(2, "s32") if len(use.operands) == 3 else "1"
    if use.named["bytes"] and len(use.operands) == 2:
        raise UnknownPTX("no number of bytes")
    count, size = ("1", number) if use.named["bytes"] else (number, "0")
    value = f"mbarrier_arrive({_at(use, 1)}, {count}, {size}, {int(not use.named['partial'])}, {use.line})"
    return f"{value};" if use.operands[0] == "_" else use.write(use.operands[0], "b64", value)


def wait(use: Use) -> str:
    """Write a wait for a phase. A fourth operand limits the time, which the emulator does not keep."""
    use.wants(3, *([4] if use.named["kind"] == "try" else []))
    phase = use.read(2, "u32" if use.named["parity"] else "u64")
    arguments = f"{phase}, {int(use.named['parity'] is not None)}, {int(use.named['kind'] == 'try')}"
    return use.write(use.operands[0], "pred", f"mbarrier_wait({_at(use, 1)}, {arguments}, {use.line})")


def barrier(use: Use) -> str:
    use.wants(1, 2)
    waits, count = int(use.named["kind"] == "sync"), use.read(1, "u32") if len(use.operands) == 2 else "THREADS"
    some = f"named_barrier({use.read(0, 'u32')}, {count}, {waits}, {use.line});"
    if not waits:
        use.wants(2)
        return some
    return f"if ({use.read(0, 'u32')} == 0 && {count} == THREADS) barrier({use.line}); else {some}"


def elect(use: Use) -> str:
    use.wants(2)
    lane, _, is_chosen = use.operands[0].partition("|")
    elected = f"uint32_t lane = warp_value(ELECT, 0, {use.read(1, 'u32')}, {use.line});"
    return f"{{ {elected} {use.write(lane, 'b32', 'lane')} {use.write(is_chosen, 'pred', 'machine.current->is_chosen')} }}"


def multiply(use: Use) -> str:
    """Write a product of a warpgroup, whose operand A is a descriptor or four registers."""
    columns, left = int(use.named["columns"]), parts(use.operands[1])
    in_registers = use.operands[1].startswith("{")
    use.wants(7 if in_registers else 8)
    sums = parts(use.operands[0])
    if columns % 8 or not 8 <= columns <= MOST_COLUMNS or len(sums) != columns // 2 or (in_registers and len(left) != OF_A):
        raise UnknownPTX(f"{use.instruction.opcode} of other registers")
    constants = use.operands[4:]
    if any(sign not in ("1", "-1") for sign in constants[:2]) or any(flag not in ("0", "1") for flag in constants[2:]):
        raise UnknownPTX(f"constants {', '.join(constants)}")
    registers = [one.removeprefix("%") for one in (*sums, *(left if in_registers else ()))]
    operands = ", ".join(f"{{&{variable(one)}, &{held(one)}}}" for one in registers)
    a, transposed_a = ("0", "0") if in_registers else (read(left[0], "u64", use.names), constants[2])
    numbers = f"{columns}, {int(use.named['kind'] == 'bf16')}, {int(in_registers)}, {use.read(3, 'pred')}"
    flags = f"{constants[0]}, {constants[1]}, {transposed_a}, {constants[-1]}, {use.line}"
    fields = f"{a}, {use.read(2, 'u64')}, {numbers}, {flags}, registers"
    return f"{{ Operand registers[] = {{{operands}}}; Given given = {{{fields}}}; wgmma(&given); }}"


RULES = (
    Rule(rf"mbarrier\.init{SHARED}\.b64", lambda use: f"mbarrier_init({_at(use, 0)}, {use.read(1, 'u32')}, {use.line});"),
    Rule(rf"mbarrier\.inval{SHARED}\.b64", lambda use: f"mbarrier_inval({_at(use, 0)}, {use.line});"),
    Rule(ARRIVE, arrive),
    Rule(
        rf"mbarrier\.expect_tx\.relaxed\.cta{SHARED}\.b64",
        lambda use: f"mbarrier_expect({_at(use, 0)}, {use.read(1, 's32')}, {use.line});",
    ),
    Rule(
        rf"mbarrier\.complete_tx\.relaxed\.cta{SHARED}\.b64",
        lambda use: f"mbarrier_expect({_at(use, 0)}, -{use.read(1, 's32')}, {use.line});",
    ),
    Rule(WAIT, wait),
    Rule(
        rf"cp\.async\.mbarrier\.arrive(?P<counted>\.noinc)?{SHARED}\.b64",
        lambda use: f"copies_arrive({_at(use, 0)}, {int(use.named['counted'] is not None)}, {use.line});",
    ),
    Rule(r"bar(?:rier)?(?:\.cta)?\.(?P<kind>sync|arrive)(?:\.aligned)?", barrier),
    Rule(r"fence\.proxy\.async(?:\.shared::cta)?", lambda use: "fence_proxy();"),
    Rule(r"fence\.mbarrier_init\.release\.cluster", lambda use: ""),
    Rule(r"elect\.sync", elect),
    Rule(
        r"setmaxnreg\.(?P<kind>inc|dec)\.sync\.aligned\.u32",
        lambda use: f"set_registers({use.read(0, 's32')}, {int(use.named['kind'] == 'inc')}, {use.line});",
    ),
    Rule(PRODUCT, multiply),
    Rule(r"wgmma\.fence\.sync\.aligned", lambda use: f"wgmma_fence({use.line});"),
    Rule(r"wgmma\.commit_group\.sync\.aligned", lambda use: f"wgmma_commit({use.line});"),
    Rule(r"wgmma\.wait_group\.sync\.aligned", lambda use: f"wgmma_wait({use.read(0, 's32')}, {use.line});"),
)
