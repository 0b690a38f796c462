"""Operands of instructions as C expressions of a type."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ptx.parse import Array, Kernel, Label, UnknownPTX

C_TYPES = {
    **{f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t" for kind in "bus" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "pred": "int",
}
"""By the type of an instruction. Halves are their bits."""

REGISTER_TYPES = {"pred": "int", "b16": "uint16_t", "b32": "uint32_t", "b64": "uint64_t", "f32": "float"}
SPECIAL = {"%tid.x": "THREAD_X", "%tid.y": "THREAD_Y", "%ntid.x": "THREADS_X", "%ctaid.x": "BLOCK", "%nctaid.x": "BLOCKS"}


@dataclass(frozen=True)
class Names:
    """What operands may name: registers with their types, places in shared memory, labels with their lines, places among the
    parameters."""

    registers: dict[str, str]
    places: dict[str, int]
    shared_bytes: int
    labels: dict[str, int]
    parameters: dict[str, int]


def names_of(kernel: Kernel) -> Names:
    """Static arrays one after the other, then the dynamic one."""
    places, end = dict[str, int](), 0
    for array in sorted(kernel.arrays, key=_is_dynamic):
        places[array.name] = end = -(-end // array.align) * array.align
        end += array.bytes or 0
    labels = {one.name: one.line for one in kernel.body if isinstance(one, Label)}
    return Names(kernel.registers, places, end, labels, {one.name: one.offset for one in kernel.parameters})


def _is_dynamic(array: Array) -> bool:
    return array.bytes is None


def place(register: str) -> tuple[str, int]:
    """The array that a register is in, and where there."""
    numbered = re.fullmatch(r"([a-z]+)(\d+)", register)
    return (numbered[1], int(numbered[2])) if numbered else (register, 0)


def variable(register: str) -> str:
    """A register as a C expression."""
    return "{}[{}]".format(*place(register))


def read(operand: str, type: str, names: Names) -> str:
    """The value of `operand` as `type`: a C expression. Raises UnknownPTX."""
    if operand.startswith("!"):
        return f"!{read(operand[1:], type, names)}"
    if operand.startswith("%") and (register := operand[1:]) in names.registers:
        return _converted(variable(register), names.registers[register], type)
    if found := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", operand):
        return f"as_float(0x{found[1]}u)" if type == "f32" else f"0x{found[1]}u"
    if re.fullmatch(r"-?\d+|0[xX][0-9A-Fa-f]+U?", operand):
        return f"(({C_TYPES[type]}){operand.rstrip('U')}{'ll' if type.endswith('64') else ''})"
    if operand in SPECIAL:
        return SPECIAL[operand]
    if operand in names.places:
        return f"{names.places[operand]}u"
    if operand in names.parameters:
        return f"((uint64_t)machine.parameters + {names.parameters[operand]})"
    raise UnknownPTX(f"operand {operand!r}")


def _converted(register: str, own: str, type: str) -> str:
    """Types of as many bits share them; of fewer bits, the lower ones are meant."""
    if own == "f32":
        return register if type == "f32" else f"(({C_TYPES[type]})as_bits({register}))"
    if type == "f32":
        return f"as_float({register})"
    return register if C_TYPES[type] == REGISTER_TYPES[own] else f"(({C_TYPES[type]}){register})"


def write(operand: str, type: str, value: str, names: Names) -> str:
    """A C statement: `operand` becomes `value`, which is of `type`. Raises UnknownPTX."""
    if operand == "_":
        return ""
    own = names.registers.get(operand.removeprefix("%"))
    if own is None:
        raise UnknownPTX(f"destination {operand!r}")
    register = variable(operand[1:])
    if (own == "f32") == (type == "f32"):
        return f"{register} = {value};"
    return f"{register} = as_{'bits' if type == 'f32' else 'float'}({value});"


def address(operand: str, names: Names) -> str:
    """`[base + offset]` as a C expression."""
    found = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", operand.replace(" ", ""))
    if found is None:
        raise UnknownPTX(f"address {operand!r}")
    base = found[1]
    wide = names.registers.get(base.removeprefix("%")) == "b64" or base in names.parameters
    return f"({read(base, 'u64' if wide else 'u32', names)} + ({found[2] or 0}))"


def parts(operand: str) -> list[str]:
    """Of a vector `{a, b}` its elements; of another operand itself."""
    return [part.strip() for part in operand.strip("{} ").split(",")] if operand.startswith("{") else [operand]
