"""A kernel in PTX to a function in C, one local variable a register, for `machine/machine.h`.

PTX text ─ parse.py ─> Kernel ─ instructions/ ─> C ─ gcc ─> a library with `ptx_launch`
"""

from __future__ import annotations

from ptx.instructions import arithmetic, conversions, logic, memory, together
from ptx.operands import REGISTER_TYPES, Names, names_of
from ptx.parse import Instruction, Label, UnknownPTX, parse

RULES = (*memory.RULES, *arithmetic.RULES, *logic.RULES, *conversions.RULES, *together.RULES)

UNSET = {"pred": "1", "b16": "0xdead", "b32": "0xdeadbeef", "b64": "0xdeadbeefdeadbeef", "f32": "NAN"}
"""What registers hold before they are written."""

TEXT = """#include "machine.h"

static int64_t static_shared_bytes(void) {{ return {shared}; }}
static int64_t parameter_bytes(void) {{ return {parameters}; }}

__attribute__((noinline, optimize("O0"))) static void kernel(void) {{
{registers}
{body}
}}
"""


def translate(text: str) -> str:
    """The C of the kernel in `text`. Raises UnknownPTX for what has no meaning here."""
    kernel = parse(text)
    names = names_of(kernel)
    registers = "\n".join(f"    {REGISTER_TYPES[_type(type)]} {name} = {UNSET[type]};" for name, type in kernel.registers.items())
    body = "\n".join(_line(statement, names) for statement in kernel.body)
    end = max((one.offset + one.bytes for one in kernel.parameters), default=0)
    return TEXT.format(shared=names.shared_bytes, parameters=end, registers=registers, body=body)


def _type(name: str) -> str:
    if name not in REGISTER_TYPES:
        raise UnknownPTX(f"registers of type {name}")
    return name


def _line(statement: Instruction | Label, names: Names) -> str:
    if isinstance(statement, Label):
        return f"{statement.name}:;"
    try:
        c = _statements(statement, names)
    except UnknownPTX as error:
        raise UnknownPTX(f"line {statement.line}: {statement.opcode} {', '.join(statement.operands)}: {error}") from None
    return f"    if ({statement.guard}) {{ {c} }}" if statement.guard else f"    {c}"


def _statements(instruction: Instruction, names: Names) -> str:
    for rule in RULES:
        if use := rule.use(instruction, names):
            return rule.c(use)
    raise UnknownPTX("an unknown instruction")
