"""Moves between registers, and between registers and memory."""

from __future__ import annotations

from ptx.instructions.rule import Rule, Use, value
from ptx.operands import C_TYPES, address, parts, read
from ptx.parse import BYTES, UnknownPTX

SECTION = "Data Movement and Conversion Instructions"
PLACES = {"param": "parameter_place", "shared": "shared_access", "global": "global_access", None: "generic_access"}
ACCESS = r"(?:\.(?P<space>{spaces}))?(?:\.v(?P<count>[24]))?\.(?P<t>[bus](?:8|16|32|64)|f32)"
HALF_OF = {"b32": "b16", "b64": "b32"}


def move(use: Use) -> str:
    """Whole registers, or one of several parts, the first of which is the lowest."""
    use.wants(2)
    to, source = use.operands
    type = use.named["t"]
    if "{" not in to + source:
        return use.write(to, type, use.read(1, type))
    half = HALF_OF[type]
    bits = int(half[1:])
    if source.startswith("{"):
        joined = " | ".join(
            f"({C_TYPES[type]}){read(part, half, use.names)} << {bits * at}" for at, part in enumerate(parts(source))
        )
        return use.write(to, type, joined)
    whole = use.read(1, type)
    return " ".join(use.write(part, half, f"({C_TYPES[half]})({whole} >> {bits * at})") for at, part in enumerate(parts(to)))


def load(use: Use) -> str:
    use.wants(2)
    type, registers = use.named["t"], parts(use.operands[0])
    got = " ".join(use.write(register, type, f"from[{at}]") for at, register in enumerate(registers))
    return f"{{ const {C_TYPES[type]} *from = {_place(use, 1, registers, is_write=False)}; {got} }}"


def store(use: Use) -> str:
    use.wants(2)
    type, registers = use.named["t"], parts(use.operands[1])
    given = " ".join(f"to[{at}] = {read(register, type, use.names)};" for at, register in enumerate(registers))
    return f"{{ {C_TYPES[type]} *to = {_place(use, 0, registers, is_write=True)}; {given} }}"


def _place(use: Use, number: int, registers: list[str], is_write: bool) -> str:
    count = int(use.named["count"] or 1)
    if count != len(registers):
        raise UnknownPTX(f"{use.instruction.opcode} of {len(registers)} registers")
    space, bytes = use.named["space"], count * BYTES[use.named["t"][1:]]
    kind = "" if space == "param" else f"{int(is_write)}, "
    return f"{PLACES[space]}({address(use.operands[number], use.names)}, {bytes}, {kind}{use.line})"


def change_atomically(use: Use) -> str:
    use.wants(3)
    given = f"{address(use.operands[1], use.names)}, {use.read(2, 'u32')}, {use.line}"
    return use.write(use.operands[0], "u32", f"atomic_{use.named['operation']}({given})")


def copy(use: Use) -> str:
    use.wants(3, 4)
    to, start = (address(operand, use.names) for operand in use.operands[:2])
    return f"copy_async({to}, {start}, {use.read(2, 'u32')}, {use.read(len(use.operands) - 1, 's32')}, {use.line});"


RULES = (
    value(r"mov\.pred", f"{SECTION}: mov", "A register or a constant.", "pred pred", "{0}"),
    value(r"mov\.(?P<t>[us](?:16|32|64)|b16|f32)", f"{SECTION}: mov", "A register, a constant or an address.", "t t", "{0}"),
    Rule(r"mov\.(?P<t>b32|b64)", f"{SECTION}: mov", "The bits, or parts of them: the first is the lowest.", move),
    Rule(
        r"ld" + ACCESS.format(spaces="param|global|shared"),
        f"{SECTION}: ld",
        "What is at an aligned address, in registers; narrow types are extended. Without a space the address is generic.",
        load,
    ),
    Rule(
        r"st" + ACCESS.format(spaces="global|shared"),
        f"{SECTION}: st",
        "Registers to an aligned address; of narrow types the lower bits. Without a space the address is generic.",
        store,
    ),
    Rule(
        r"atom\.global\.(?P<operation>add(?=\.u)|or(?=\.b))\.[ub]32",
        "Parallel Synchronization and Communication Instructions: atom",
        "Sum or union replaces what is in memory, in one piece; the result is what was there.",
        change_atomically,
    ),
    Rule(
        r"cp\.async\.cg\.shared\.global",
        f"{SECTION}: cp.async",
        "Begins a copy of 16 bytes to shared memory: as many as the last operand says, if there is one, then zeros.",
        copy,
    ),
    Rule(
        r"cp\.async\.commit_group",
        f"{SECTION}: cp.async.commit_group",
        "All copies of the thread that are in no group yet are one.",
        lambda use: "copies_commit();",
    ),
    Rule(
        r"cp\.async\.wait_group",
        f"{SECTION}: cp.async.wait_group / cp.async.wait_all",
        "Waits until at most so many of the thread's last groups are under way.",
        lambda use: f"copies_wait({use.read(0, 's32')}, {use.line});",
    ),
)
