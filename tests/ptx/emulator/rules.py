"""Operands of instructions as C expressions, and rules that write an instruction in C."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ptx.emulator.parse import Instruction, Kernel, Label, UnknownPTX

C_TYPES = {
    **{f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t" for kind in "bus" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "pred": "int",
}
"""C types by the type of an instruction. Halves are their bits."""

REGISTER_TYPES = {"pred": "int", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t", "f32": "float"}
SPECIAL = {"%tid.x": "THREAD_X", "%tid.y": "THREAD_Y", "%ntid.x": "THREADS_X", "%ctaid.x": "BLOCK", "%nctaid.x": "BLOCKS"}


@dataclass(frozen=True)
class Names:
    """Names that operands may use.

    Registers have types, arrays places in shared memory, labels lines, and parameters places among the launch's bytes. `held` are
    registers that products of warpgroups use.
    """

    registers: dict[str, str]
    places: dict[str, int]
    shared_bytes: int
    labels: dict[str, int]
    parameters: dict[str, int]
    held: frozenset[str]


@dataclass(frozen=True)
class Use:
    """Instruction that a rule serves, and the named parts of its opcode."""

    instruction: Instruction
    named: dict[str, str]
    names: Names

    @property
    def operands(self) -> tuple[str, ...]:
        return self.instruction.operands

    @property
    def line(self) -> int:
        return self.instruction.line

    def read(self, number: int, type: str) -> str:
        return read(self.operands[number], type, self.names)

    def write(self, operand: str, type: str, value: str) -> str:
        return write(operand, type, value, self.names)

    def wants(self, *counts: int) -> None:
        """Raise UnknownPTX for another number of operands."""
        if len(self.operands) not in counts:
            raise UnknownPTX(f"{self.instruction.opcode} with {len(self.operands)} operands")


@dataclass(frozen=True)
class Rule:
    """Pattern of opcodes, and a function that writes such an instruction as C statements."""

    opcode: str
    c: Callable[[Use], str]


def value(opcode: str, types: str, c: str, counts: str = "") -> Rule:
    """Return the rule of an instruction whose first operand becomes the value of an expression of the others.

    Args:
        opcode: Pattern of opcodes.
        types: Type of each operand. `t` and `from` are groups of the pattern; `wide` is the type of twice as many bits as `t`.
        c: Expression in C, where {0}, {1}, ... are the operands after the first, {C} is the C type of the result and {line} the
            line. Other names are groups of the pattern.
        counts: Number that the instruction adds to, of `machine/thread.h`.
    """

    def statements(use: Use) -> str:
        t = use.named.get("t") or ""
        known = {**use.named, "wide": f"{t[0]}{2 * int(t[1:])}" if t[1:].isdigit() else ""}
        result, *sources = (known.get(name) or name for name in types.split())
        use.wants(1 + len(sources))
        operands = (use.read(number, type) for number, type in enumerate(sources, 1))
        expression = c.format(*operands, C=C_TYPES[result], line=use.line, **use.named)
        counted = f"COUNT({counts}, 1); " if counts else ""
        return counted + use.write(use.operands[0], result, f"({C_TYPES[result]})({expression})")

    return Rule(opcode, statements)


def names_of(kernel: Kernel) -> Names:
    """Place static arrays one after the other, then the dynamic one."""
    places, end = dict[str, int](), 0
    for array in sorted(kernel.arrays, key=lambda array: array.bytes is None):
        places[array.name] = end = -(-end // array.align) * array.align
        end += array.bytes or 0
    labels = {one.name: one.line for one in kernel.body if isinstance(one, Label)}
    products = [one for one in kernel.body if isinstance(one, Instruction) and one.opcode.startswith("wgmma.mma_async")]
    held = frozenset(name for one in products for name in registers_of(one) if kernel.registers.get(name) in ("f32", "b32"))
    return Names(kernel.registers, places, end, labels, {one.name: one.offset for one in kernel.parameters}, held)


def registers_of(instruction: Instruction) -> list[str]:
    return re.findall(r"%(\w+)", " ".join(instruction.operands))


def place(register: str) -> tuple[str, int]:
    numbered = re.fullmatch(r"([a-z]+)(\d+)", register)
    return (numbered[1], int(numbered[2])) if numbered else (register, 0)


def variable(register: str) -> str:
    return "{}[{}]".format(*place(register))


def held(register: str) -> str:
    return "{}_held[{}]".format(*place(register))


def read(operand: str, type: str, names: Names) -> str:
    """Return the value of `operand` as `type`, in C. Raises UnknownPTX."""
    if operand.startswith("!"):
        return f"!{read(operand[1:], type, names)}"
    if operand.startswith("%") and (register := operand[1:]) in names.registers:
        return _converted(variable(register), names.registers[register], type)
    if bits := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", operand):
        return f"as_float(0x{bits[1]}u)" if type == "f32" else f"0x{bits[1]}u"
    if re.fullmatch(r"-?\d+|0[xX][0-9A-Fa-f]+U?", operand):
        return f"(({C_TYPES[type]}){operand.rstrip('U')}{'ll' if type.endswith('64') else ''})"
    if operand in SPECIAL:
        return SPECIAL[operand]
    if operand in names.places:
        return f"{names.places[operand]}u"
    if operand in names.parameters:
        return f"((uint64_t)machine.parameters + {names.parameters[operand]})"
    raise UnknownPTX(f"operand {operand!r}")


def _converted(register: str, register_type: str, type: str) -> str:
    """Reinterpret the bits of a register; of a narrower type the lower bits are meant."""
    if register_type == "f32":
        return register if type == "f32" else f"(({C_TYPES[type]})as_bits({register}))"
    if type == "f32":
        return f"as_float({register})"
    return register if C_TYPES[type] == REGISTER_TYPES[register_type] else f"(({C_TYPES[type]}){register})"


def write(operand: str, type: str, value: str, names: Names) -> str:
    """Return a C statement that sets `operand` to `value`, which is of `type`. Raises UnknownPTX."""
    if operand == "_":
        return ""
    register_type = names.registers.get(operand.removeprefix("%"))
    if register_type is None:
        raise UnknownPTX(f"destination {operand!r}")
    register = variable(operand[1:])
    if (register_type == "f32") == (type == "f32"):
        return f"{register} = {value};"
    return f"{register} = as_{'bits' if type == 'f32' else 'float'}({value});"


def address(operand: str, names: Names) -> str:
    matched = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", operand.replace(" ", ""))
    if matched is None:
        raise UnknownPTX(f"address {operand!r}")
    base, offset = matched.groups()
    is_wide = names.registers.get(base.removeprefix("%")) == "b64" or base in names.parameters
    return f"({read(base, 'u64' if is_wide else 'u32', names)} + ({offset or 0}))"


def parts(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")] if operand.startswith("{") else [operand]
