"""A kernel in PTX to a function in C, an array for each kind of register, for `machine/machine.h`.

PTX text ─ parse.py ─> Kernel ─ instructions/ ─> C ─ gcc ─> a library with `ptx_launch`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from ptx.instructions import arithmetic, conversions, logic, memory, together
from ptx.instructions.rule import Rule
from ptx.operands import REGISTER_TYPES, Names, names_of, place, variable
from ptx.parse import Instruction, Label, UnknownPTX, parse

RULES = (*memory.RULES, *arithmetic.RULES, *logic.RULES, *conversions.RULES, *together.RULES)

UNSET = {"pred": "1", "b16": "0xdeaddead", "b32": "0xdeadbeef", "b64": "0xdeadbeef", "f32": "0x7fc00000"}
"""What each 32 bits of registers are before they are written."""

TEXT = """#include "machine.h"

int64_t static_shared_bytes(void) {{ return {shared}; }}
int64_t parameter_bytes(void) {{ return {parameters}; }}

void kernel(void) {{
{registers}
{body}
}}
"""


def translate(text: str) -> str:
    """The C of the kernel in `text`. Raises UnknownPTX for what has no meaning here."""
    kernel = parse(text)
    names = names_of(kernel)
    registers = "\n".join(_declarations(kernel.registers))
    body = "\n".join(_line(statement, names) for statement in kernel.body)
    end = max((one.offset + one.bytes for one in kernel.parameters), default=0)
    return TEXT.format(shared=names.shared_bytes, parameters=end, registers=registers, body=body)


def _declarations(registers: dict[str, str]) -> Iterator[str]:
    """Arrays are compiled in less time than as many variables."""
    counts = {name: at + 1 for name, at in sorted(map(place, registers))}
    types = {place(register)[0]: type for register, type in registers.items()}
    for name, type in types.items():
        if type not in REGISTER_TYPES:
            raise UnknownPTX(f"registers of type {type}")
        yield f"    {REGISTER_TYPES[type]} {name}[{counts[name] + counts[name] % 2}];"
        yield f"    wmemset((wchar_t *){name}, {UNSET[type]}, sizeof {name} / sizeof(wchar_t));"


def _line(statement: Instruction | Label, names: Names) -> str:
    if isinstance(statement, Label):
        return f"{statement.name}:;"
    try:
        c = _statements(statement, names)
    except UnknownPTX as error:
        raise UnknownPTX(f"line {statement.line}: {statement.opcode} {', '.join(statement.operands)}: {error}") from None
    if not statement.guard:
        return f"    {c}"
    return f"    if ({'!' * statement.guard.startswith('!')}{variable(statement.guard.lstrip('!'))}) {{ {c} }}"


def _statements(instruction: Instruction, names: Names) -> str:
    rule = rule_of(instruction.opcode)
    if rule is None:
        raise UnknownPTX("an unknown instruction")
    return rule.c(rule.use(instruction, names))


@cache
def rule_of(opcode: str) -> Rule | None:
    return next((rule for rule in RULES if re.fullmatch(rule.opcode, opcode)), None)
