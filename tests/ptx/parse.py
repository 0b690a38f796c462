"""PTX as text to records: as much of the language as compilers write for these kernels. What else there is, is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


class UnknownPTX(ValueError):
    """A directive, an instruction or an operand without a meaning here."""


@dataclass(frozen=True)
class Instruction:
    """`guard`: a predicate, `!` before it if it is negated, or ""."""

    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    """`$name:` in a kernel, at a line."""

    line: int
    name: str


@dataclass(frozen=True)
class Array:
    """An array in shared memory; of a dynamic one, whose size the launch says, `bytes` is None."""

    name: str
    align: int
    bytes: int | None


@dataclass(frozen=True)
class Parameter:
    """So many bytes of what a launch passes, from `offset` on."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """`registers`: the type by name without `%`."""

    name: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, str]
    arrays: tuple[Array, ...]
    body: tuple[Instruction | Label, ...]


HEAD = re.compile(r"\.version [\d.]+\s*\.target (\w+)\s*\.address_size 64")
IGNORED = re.compile(r"//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*", re.MULTILINE)
"""Comments, and places in the source of the kernel."""
DEBUGGING = re.compile(r"^\s*\.section\b", re.MULTILINE)
ENTRY = re.compile(r"\.visible \.entry ([\w$]+)\(([^)]*)\)(?:\s*\.(?:maxntid|minnctapersm|reqntid) [\d, ]+)*\s*\{")
PARAMETER = re.compile(r"\.param(?: \.align (\d+))? \.[a-z](\d+)(?: \.ptr(?: \.global)? \.align \d+)? ([\w$]+)(?:\[(\d+)\])?")
ELSEWHERE = re.compile(r"(?:\.common )?\.global .*", re.DOTALL)
"""What lies in global memory. An operand that names it is unknown."""
ARRAY = re.compile(r"(\.extern |\.visible )?\.shared \.align (\d+) \.[a-z](\d+) (\w+)(?:\[(\d*)\])?")
REGISTERS = re.compile(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>")
OWN_REGISTER = re.compile(r"\.reg \.(\w+) (\w+)")
GUARDED = re.compile(r"(?:@(!?)%(\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
STATEMENT = re.compile(r"\s*(?:\$(\w+):|([{}])|([^;]+);)")


def parse(text: str) -> Kernel:
    """The one kernel of `text`. Raises UnknownPTX."""
    text = DEBUGGING.split(IGNORED.sub("", text))[0]
    entry = ENTRY.search(text)
    if entry is None:
        raise UnknownPTX("no kernel")
    before = map(str.strip, HEAD.sub("", text[: entry.start()]).split(";"))
    arrays = [_array(part) for part in before if part and not ELSEWHERE.fullmatch(part)]
    return _Body(text, entry.end(), arrays).kernel(entry[1], _parameters(entry[2]))


def _parameters(text: str) -> tuple[Parameter, ...]:
    """One after the other, each aligned."""
    found, end = list[Parameter](), 0
    for part in filter(None, map(str.strip, text.split(","))):
        declared = PARAMETER.fullmatch(part)
        if declared is None:
            raise UnknownPTX(part)
        size = int(declared[4] or 1) * BYTES[declared[2]]
        align = int(declared[1] or BYTES[declared[2]])
        found.append(Parameter(declared[3], offset := -(-end // align) * align, size))
        end = offset + size
    return tuple(found)


class _Body:
    """Reads the statements of a kernel from `at` on."""

    def __init__(self, text: str, at: int, arrays: list[Array]) -> None:
        self.text, self.at, self.line = text, at, 1 + text.count("\n", 0, at)
        self.registers: dict[str, str] = {}
        self.arrays, self.body = arrays, list[Instruction | Label]()
        self.scopes: list[dict[str, str]] = []
        self.scope_count = 0

    def kernel(self, name: str, parameters: tuple[Parameter, ...]) -> Kernel:
        while self._statement():
            pass
        if self.text[self.at :].strip():
            raise UnknownPTX(f"line {self.line}: more than one kernel")
        return Kernel(name, parameters, self.registers, tuple(self.arrays), tuple(self.body))

    def _statement(self) -> bool:
        """Read one; False after the last."""
        found = STATEMENT.match(self.text, self.at)
        if found is None:
            raise UnknownPTX(f"line {self.line}: the kernel does not end")
        start = found.start(found.lastindex or 0)
        self.line += self.text.count("\n", self.at, start)
        line, label, brace, statement = self.line, *found.groups()
        self.line += self.text.count("\n", start, found.end())
        self.at = found.end()
        if label:
            self.body.append(Label(line, label))
        elif brace == "{":
            self.scopes.append({})
            self.scope_count += 1
        elif brace:
            if not self.scopes:
                return False
            self.scopes.pop()
        else:
            self._add(line, statement.strip())
        return True

    def _add(self, line: int, statement: str) -> None:
        if statement.startswith(".reg"):
            self._declare(line, statement)
        elif statement.startswith((".shared", ".extern")):
            self.arrays.append(_array(statement))
        elif statement.startswith("."):
            if not statement.startswith(".pragma"):
                raise UnknownPTX(f"line {line}: {statement}")
        else:
            self.body.append(self._instruction(line, statement))

    def _declare(self, line: int, statement: str) -> None:
        if found := REGISTERS.fullmatch(statement):
            self.registers |= {f"{found[2]}{i}": found[1] for i in range(int(found[3]))}
        elif (found := OWN_REGISTER.fullmatch(statement)) and self.scopes:
            name = f"own{self.scope_count}_{found[2]}"
            self.scopes[-1][found[2]] = f"%{name}"
            self.registers[name] = found[1]
        else:
            raise UnknownPTX(f"line {line}: {statement}")

    def _instruction(self, line: int, statement: str) -> Instruction:
        found = GUARDED.fullmatch(statement)
        if found is None:
            raise UnknownPTX(f"line {line}: {statement}")
        operands = found[4]
        for scope in self.scopes:
            for name, own in scope.items():
                operands = re.sub(rf"(?<![\w%$]){name}\b", own, operands)
        return Instruction(line, f"{found[1]}{found[2]}" if found[2] else "", found[3], split(operands))


def split(operands: str) -> tuple[str, ...]:
    """At the commas outside of brackets and braces."""
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", operands) if part.strip())


def _array(text: str) -> Array:
    found = ARRAY.fullmatch(text)
    if found is None:
        raise UnknownPTX(text)
    size = None if found[1] == ".extern " else int(found[5] or 1) * BYTES[found[3]]
    return Array(found[4], int(found[2]), size)
