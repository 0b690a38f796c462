"""PTX text as records: the part of the language that NVRTC, Triton and numba write. Anything else is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


class UnknownPTX(ValueError):
    """A directive, an instruction or an operand that the emulator does not know."""


@dataclass(frozen=True)
class Instruction:
    """Instruction at a line; `guard` is a predicate, with `!` before it if it is negated, or ""."""

    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    line: int
    name: str


@dataclass(frozen=True)
class Array:
    """Array in shared memory; `bytes` is None where the launch sets its size."""

    name: str
    align: int
    bytes: int | None


@dataclass(frozen=True)
class Parameter:
    """Parameter of a kernel: its place and size among the bytes that a launch passes."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Entry:
    """Head of a kernel; `target` is the kind of GPU, such as `sm_80`."""

    name: str
    target: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Kernel:
    """Body of a kernel; `registers` holds types by name without `%`."""

    parameters: tuple[Parameter, ...]
    registers: dict[str, str]
    arrays: tuple[Array, ...]
    body: tuple[Instruction | Label, ...]


HEAD = re.compile(r"\.version [\d.]+\s*\.target (\w+)\s*\.address_size 64")
IGNORED = re.compile(r"//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*", re.MULTILINE)
"""Comments, and lines of the kernel's source."""
DEBUGGING = re.compile(r"^\s*\.section\b", re.MULTILINE)
ENTRY = re.compile(r"\.visible \.entry ([\w$]+)\(([^)]*)\)(?:\s*\.(?:maxntid|minnctapersm|reqntid) [\d, ]+)*\s*\{")
PARAMETER = re.compile(r"\.param(?: \.align (\d+))? \.[a-z](\d+)(?: \.ptr(?: \.global)? \.align \d+)? ([\w$]+)(?:\[(\d+)\])?")
ELSEWHERE = re.compile(r"(?:\.common )?\.global .*", re.DOTALL)
"""Arrays in global memory. An operand that names one is unknown."""
ARRAY = re.compile(r"(\.extern |\.visible )?\.shared \.align (\d+) \.[a-z](\d+) (\w+)(?:\[(\d*)\])?")
REGISTERS = re.compile(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>")
OWN_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%?\w+(?:\s*,\s*%?\w+)*)")
GUARDED = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
STATEMENT = re.compile(r"\s*(?:(\$?\w+):(?!:)|([{}])|([^;]+);)")


def parse(text: str) -> Kernel:
    """Return the one kernel of `text`. Raises UnknownPTX."""
    text = DEBUGGING.split(IGNORED.sub("", text))[0]
    entry = ENTRY.search(text)
    if entry is None:
        raise UnknownPTX("no kernel")
    before = map(str.strip, HEAD.sub("", text[: entry.start()]).split(";"))
    arrays = [_array(part) for part in before if part and not ELSEWHERE.fullmatch(part)]
    body = _Body(arrays)
    body.read(text, entry.end())
    return Kernel(_parameters(entry[2]), body.registers, tuple(arrays), tuple(body.statements))


def entry_of(text: str) -> Entry:
    """Return the head of the kernel of `text` without reading its body. Raises UnknownPTX."""
    start = text.find(".visible .entry")
    target, entry = HEAD.search(text), ENTRY.search(IGNORED.sub("", text[start : text.find("{", start) + 1]))
    if target is None or entry is None:
        raise UnknownPTX("no kernel")
    return Entry(entry[1], target[1], _parameters(entry[2]))


def _parameters(text: str) -> tuple[Parameter, ...]:
    parameters, end = list[Parameter](), 0
    for part in filter(None, map(str.strip, text.split(","))):
        declared = PARAMETER.fullmatch(part)
        if declared is None:
            raise UnknownPTX(part)
        size = int(declared[4] or 1) * BYTES[declared[2]]
        align = int(declared[1] or BYTES[declared[2]])
        parameters.append(Parameter(declared[3], offset := -(-end // align) * align, size))
        end = offset + size
    return tuple(parameters)


class _Body:
    def __init__(self, arrays: list[Array]) -> None:
        self.registers: dict[str, str] = {}
        self.arrays, self.statements = arrays, list[Instruction | Label]()
        self.scopes: list[tuple[str, dict[str, str]]] = []
        self.scope_count = 0

    def read(self, text: str, start: int) -> None:
        """Read all statements from `start` on, to the end of the kernel. Raises UnknownPTX."""
        line, place = 1, 0
        for matched in STATEMENT.finditer(text, start):
            label, brace, statement = matched.groups()
            begin = matched.start(matched.lastindex or 0)
            line, place = line + text.count("\n", place, begin), begin
            if label:
                self.statements.append(Label(line, self._label(label)))
            elif brace == "{":
                self.scope_count += 1
                self.scopes.append((f"own{self.scope_count}_", {}))
            elif brace and self.scopes:
                self.scopes.pop()
            elif brace and text[matched.end() :].strip():
                raise UnknownPTX(f"line {line}: more than one kernel")
            elif brace:
                return
            else:
                self._add(line, statement.strip())
        raise UnknownPTX(f"line {line}: the kernel does not end")

    def _add(self, line: int, statement: str) -> None:
        if statement.startswith(".reg"):
            self._declare(line, statement)
        elif statement.startswith((".shared", ".extern")):
            self.arrays.append(_array(statement))
        elif statement.startswith("."):
            if not statement.startswith(".pragma"):
                raise UnknownPTX(f"line {line}: {statement}")
        else:
            self.statements.append(self._instruction(line, statement))

    def _declare(self, line: int, statement: str) -> None:
        if found := REGISTERS.fullmatch(statement):
            self.registers |= {f"{found[2]}{i}": found[1] for i in range(int(found[3]))}
        elif (found := OWN_REGISTERS.fullmatch(statement)) and self.scopes:
            prefix, names = self.scopes[-1]
            for own in re.split(r"\s*,\s*", found[2]):
                name = prefix + own.lstrip("%")
                names[own] = f"%{name}"
                self.registers[name] = found[1]
        else:
            raise UnknownPTX(f"line {line}: {statement}")

    def _instruction(self, line: int, statement: str) -> Instruction:
        found = GUARDED.fullmatch(statement)
        if found is None:
            raise UnknownPTX(f"line {line}: {statement}")
        guard, operands = found[2] or "", found[4]
        if found[3].startswith("bra") and self.scopes and not operands.startswith("$"):
            operands = self._label(operands)
        for _, names in reversed(self.scopes):
            for name, own in names.items():
                guard, operands = (re.sub(rf"(?<![\w%$]){re.escape(name)}\b", own, text) for text in (guard, operands))
        return Instruction(line, f"{found[1] or ''}{guard.lstrip('%')}", found[3], split(operands))

    def _label(self, name: str) -> str:
        """Return the name of a label, which a scope has for itself unless it begins with $."""
        return name.removeprefix("$") if name.startswith("$") or not self.scopes else self.scopes[-1][0] + name


def split(operands: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", operands) if part.strip())


def _array(text: str) -> Array:
    found = ARRAY.fullmatch(text)
    if found is None:
        raise UnknownPTX(text)
    size = None if found[1] == ".extern " else int(found[5] or 1) * BYTES[found[3]]
    return Array(found[4], int(found[2]), size)
