"""Instructions that move data, branch, or act on several lanes together, by section of the PTX ISA."""

from __future__ import annotations

from ptx.emulator.parse import BYTES, UnknownPTX
from ptx.emulator.rules import C_TYPES, Rule, Use, address, parts, read

ACCESS = r"(?:\.(?P<space>{spaces}))?(?:\.v(?P<count>[24]))?\.(?P<t>[bus](?:8|16|32|64)|f32)"
"""Without a space an address is generic."""
ATOMIC = (
    r"\.global(?:\.gpu)?(?:\.(?P<order>relaxed|acquire|release|acq_rel))?\.(?P<operation>add|or)"
    r"\.(?P<t>(?<=add\.)(?:u32|f32)|(?<=or\.)b32)"
)
"""Without an order an atomic operation is relaxed."""
ORDERS = {"relaxed": 0, "acquire": "ACQUIRES", "release": "RELEASES", "acq_rel": "ACQUIRES | RELEASES"}
MATRICES = r"\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<form>\.trans)?\.shared\.b16"
HALF_OF = {"b32": "b16", "b64": "b32"}
LEAST_COPIED = {"ca": 4, "cg": 16}
"""Smallest asynchronous copy in bytes, by the caches that keep it."""
REGISTERS = {"8": (2, 1), "16": (4, 2)}
"""Registers of A and B in a product, by depth."""


def move(use: Use) -> str:
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
    type, registers = use.named["t"], _registers(use, 0)
    got = " ".join(use.write(register, type, f"from[{at}]") for at, register in enumerate(registers))
    where, size = address(use.operands[1], use.names), len(registers) * BYTES[type[1:]]
    return f"{{ const {C_TYPES[type]} *from = {_space(use)}_load({where}, {size}, {use.line}); {got} }}"


def store(use: Use) -> str:
    use.wants(2)
    type, registers = use.named["t"], _registers(use, 1)
    given = ", ".join(read(register, type, use.names) for register in registers)
    where, size = address(use.operands[0], use.names), len(registers) * BYTES[type[1:]]
    return f"{{ {C_TYPES[type]} given[] = {{{given}}}; {_space(use)}_store({where}, given, {size}, {use.line}); }}"


def _space(use: Use) -> str:
    return (use.named["space"] or "generic").removesuffix("::cta")


def _registers(use: Use, number: int) -> list[str]:
    """Return the registers of operand `number`. Raises UnknownPTX if they are not as many as the opcode has."""
    registers = parts(use.operands[number])
    if len(registers) != int(use.named["count"] or 1):
        raise UnknownPTX(f"{use.instruction.opcode} of {len(registers)} registers")
    return registers


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
    """Apply the operand after `place` to memory at the address `place`; the value is what memory held before."""
    type, order = use.named["t"], ORDERS[use.named["order"] or "relaxed"]
    given = f"{address(use.operands[place], use.names)}, {use.read(place + 1, type)}, {order}, {use.line}"
    return f"atomic_{use.named['operation']}_{type}({given})"


def copy(use: Use) -> str:
    """Begin a copy to shared memory. A fourth operand limits the bytes that are read; the rest are zeros."""
    use.wants(3, 4)
    to, start = (address(operand, use.names) for operand in use.operands[:2])
    sizes = f"{use.read(2, 's32')}, {use.read(len(use.operands) - 1, 's32')}, {LEAST_COPIED[use.named['cached']]}"
    return f"copy_async({to}, {start}, {sizes}, {use.line});"


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
    got = " ".join(use.write(register, "b32", f"out[{at}]") for at, register in enumerate(_registers(use, 0)))
    is_transposed = int(use.named["form"] is not None)
    called = f"ldmatrix({use.named['count']}, {is_transposed}, {address(use.operands[1], use.names)}, {use.line})"
    return f"{{ const uint32_t *out = {called}; {got} }}"


def store_matrices(use: Use) -> str:
    use.wants(2)
    given = [address(use.operands[0], use.names), *(read(register, "b32", use.names) for register in _registers(use, 1))]
    put = " ".join(f"in[{at}] = {x};" for at, x in enumerate(given))
    is_transposed = int(use.named["form"] is not None)
    return f"{{ uint32_t *in = machine.current->in; {put} stmatrix({use.named['count']}, {is_transposed}, {use.line}); }}"


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


DATA_MOVEMENT = (
    Rule(r"mov\.(?P<t>b32|b64)", move),
    Rule(r"ld" + ACCESS.format(spaces="param|global|shared"), load),
    Rule(r"st" + ACCESS.format(spaces="global|shared(?:::cta)?"), store),
    Rule(r"ld\.global\.gpu\.(?P<order>relaxed|acquire)\.b32", load_atomically),
    Rule(r"cp\.async\.(?P<cached>ca|cg)\.shared\.global", copy),
    Rule(r"cp\.async\.commit_group", lambda use: "copies_commit();"),
    Rule(r"cp\.async\.wait_group", lambda use: f"copies_wait({use.read(0, 's32')}, {use.line});"),
    Rule(r"shfl\.sync\.(?P<mode>bfly|idx|up|down)\.b32", shuffle),
)
CONTROL_FLOW = (Rule(r"bra(?:\.uni)?", branch), Rule(r"ret", lambda use: "return;"))
SYNCHRONIZATION = (
    Rule(r"bar\.warp\.sync", lambda use: f"warp_value(MEET, 0, {use.read(0, 'u32')}, {use.line});"),
    Rule(r"membar\.gl", lambda use: "fence();"),
    Rule(r"atom" + ATOMIC, change_atomically),
    Rule(r"red" + ATOMIC, reduce_atomically),
)
MATRIX_INSTRUCTIONS = (
    Rule(r"ldmatrix" + MATRICES, load_matrices),
    Rule(r"stmatrix" + MATRICES, store_matrices),
    Rule(r"mma\.sync\.aligned\.m16n8k(?P<depth>8|16)\.row\.col\.f32\.(?P<kind>f16|bf16)\.(?P=kind)\.f32", multiply),
)
RULES = (*DATA_MOVEMENT, *CONTROL_FLOW, *SYNCHRONIZATION, *MATRIX_INSTRUCTIONS)
