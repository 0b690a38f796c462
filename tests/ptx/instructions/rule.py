"""What an instruction means: a rule for each opcode, with the sentence of the PTX ISA that it follows, and the C that does it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ptx.operands import C_TYPES, Names, read, write
from ptx.parse import Instruction, UnknownPTX


@dataclass(frozen=True)
class Use:
    """An instruction that a rule serves: its operands, and the parts of its opcode by the names of the rule's pattern."""

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
        """Raises UnknownPTX for another number of operands."""
        if len(self.operands) not in counts:
            raise UnknownPTX(f"{self.instruction.opcode} with {len(self.operands)} operands")


@dataclass(frozen=True)
class Rule:
    """`opcode`: a pattern of opcodes. `section` of the PTX ISA, and what it `says`, in our words. `c`: the statements."""

    opcode: str
    section: str
    says: str
    c: Callable[[Use], str]

    def use(self, instruction: Instruction, names: Names) -> Use:
        """Its use for an instruction, whose opcode it has."""
        found = re.fullmatch(self.opcode, instruction.opcode)
        assert found, instruction
        return Use(instruction, found.groupdict(), names)


def value(opcode: str, section: str, says: str, types: str, c: str, counts: str = "") -> Rule:
    """The rule of an instruction whose first operand becomes the value of an expression of the others.

    `types` of all operands: `t` and `from` stand for those that the opcode names so, `wide` for the one of twice as many bits.
    In `c`, {0}, {1}, ... are the operands after the first, {C} is the C type of the result, {line} that of the instruction;
    other names are those of the pattern. `counts`: what is counted, of `machine/counts.h`.
    """

    def statements(use: Use) -> str:
        of = {**use.named, "wide": wide(use.named.get("t") or "")}
        result, *sources = (of.get(name) or name for name in types.split())
        use.wants(1 + len(sources))
        given = (use.read(number, type) for number, type in enumerate(sources, 1))
        expression = c.format(*given, C=C_TYPES[result], line=use.line, **use.named)
        counted = f"COUNT({counts}, 1); " if counts else ""
        return counted + use.write(use.operands[0], result, f"({C_TYPES[result]})({expression})")

    return Rule(opcode, section, says, statements)


def wide(type: str) -> str:
    """The type of twice as many bits."""
    return f"{type[0]}{2 * int(type[1:])}" if type[1:].isdigit() else ""
