"""Moves between registers, and between registers and memory."""

from __future__ import annotations

from ptx.instructions.rule import Rule, Use, value
from ptx.operands import C_TYPES, address, parts, read
from ptx.parse import BYTES, UnknownPTX

SECTION = "Data Movement and Conversion Instructions"
SYNC = "Parallel Synchronization and Communication Instructions"
ACCESS = r"(?:\.(?P<space>{spaces}))?(?:\.v(?P<count>[24]))?\.(?P<t>[bus](?:8|16|32|64)|f32)"
ATOMIC = (
    r"\.global(?:\.gpu)?(?:\.(?P<order>relaxed|acquire|release|acq_rel))?\.(?P<operation>add|or)"
    r"\.(?P<t>(?<=add\.)(?:u32|f32)|(?<=or\.)b32)"
)
ORDERS = {"relaxed": 0, "acquire": "ACQUIRES", "release": "RELEASES", "acq_rel": "ACQUIRES | RELEASES"}
HALF_OF = {"b32": "b16", "b64": "b32"}
LEAST_COPIED = {"ca": 4, "cg": 16}
"""Bytes of an asynchronous copy, by the caches that keep it."""


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
    where = address(use.operands[1], use.names)
    return f"{{ const {C_TYPES[type]} *from = {_space(use)}_load({where}, {_bytes(use, registers)}, {use.line}); {got} }}"


def store(use: Use) -> str:
    use.wants(2)
    type, registers = use.named["t"], parts(use.operands[1])
    given = ", ".join(read(register, type, use.names) for register in registers)
    stored = f"{_space(use)}_store({address(use.operands[0], use.names)}, given, {_bytes(use, registers)}, {use.line});"
    return f"{{ {C_TYPES[type]} given[] = {{{given}}}; {stored} }}"


def _space(use: Use) -> str:
    return (use.named["space"] or "generic").removesuffix("::cta")


def _bytes(use: Use, registers: list[str]) -> int:
    count = int(use.named["count"] or 1)
    if count != len(registers):
        raise UnknownPTX(f"{use.instruction.opcode} of {len(registers)} registers")
    return count * BYTES[use.named["t"][1:]]


def change_atomically(use: Use) -> str:
    use.wants(3)
    return use.write(use.operands[0], use.named["t"], _changed(use, 1))


def load_atomically(use: Use) -> str:
    use.wants(2)
    loaded = f"atomic_load({address(use.operands[1], use.names)}, {ORDERS[use.named['order']]}, {use.line})"
    return use.write(use.operands[0].strip("{ }"), "b32", loaded)


def reduce_atomically(use: Use) -> str:
    use.wants(2)
    return f"{_changed(use, 0)};"


def _changed(use: Use, place: int) -> str:
    """What was at the address that is the operand `place`, before the next operand changes it."""
    type, order = use.named["t"], ORDERS[use.named["order"] or "relaxed"]
    given = f"{address(use.operands[place], use.names)}, {use.read(place + 1, type)}, {order}, {use.line}"
    return f"atomic_{use.named['operation']}_{type}({given})"


def copy(use: Use) -> str:
    use.wants(3, 4)
    to, start = (address(operand, use.names) for operand in use.operands[:2])
    sizes = f"{use.read(2, 's32')}, {use.read(len(use.operands) - 1, 's32')}, {LEAST_COPIED[use.named['cached']]}"
    return f"copy_async({to}, {start}, {sizes}, {use.line});"


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
        r"st" + ACCESS.format(spaces="global|shared(?:::cta)?"),
        f"{SECTION}: st",
        "Registers to an aligned address; of narrow types the lower bits. Without a space the address is generic.",
        store,
    ),
    Rule(
        r"ld\.global\.gpu\.(?P<order>relaxed|acquire)\.b32",
        f"{SECTION}: ld",
        "An atomic load; .acquire: after it the thread sees what others had done before a release at this address.",
        load_atomically,
    ),
    Rule(
        r"atom" + ATOMIC,
        f"{SYNC}: atom",
        "Sum or union replaces what is in memory, in one piece; the result is what was there. Without an order it is relaxed.",
        change_atomically,
    ),
    Rule(r"red" + ATOMIC, f"{SYNC}: red", "As atom, without a result.", reduce_atomically),
    Rule(
        r"cp\.async\.(?P<cached>ca|cg)\.shared\.global",
        f"{SECTION}: cp.async",
        "Begins a copy of 4, 8 or 16 bytes, with .cg of 16, to shared memory: as many as the last operand says, if there is one, "
        "then zeros.",
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
