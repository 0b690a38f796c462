"""PTX text to a compiled library.

text ─ parse.py ─> Kernel ─ values.py, effects.py ─> C ─ gcc ─> a library with `ptx_launch` of machine/machine.h

Libraries are kept in build/ beside this file, by the PTX, the sources of this package and the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from ptx.emulator import effects, hopper, values
from ptx.emulator.parse import Instruction, Label, UnknownPTX, parse
from ptx.emulator.rules import REGISTER_TYPES, Names, Rule, Use, held, names_of, place, registers_of, variable

HERE = Path(__file__).parent
MACHINE, BUILD = HERE / "machine", HERE / "build"
FLAGS = (
    *("-std=gnu11", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv"),
    *("-fPIC", "-fvisibility=hidden", "-w", f"-I{MACHINE}"),
)
WEEK = 7 * 24 * 3600

RULES = (*values.RULES, *effects.RULES, *hopper.RULES)
UNSET = {"pred": "1", "b16": "0xdeaddead", "b32": "0xdeadbeef", "b64": "0xdeadbeef", "f32": "0x7fc00000"}
"""Contents of each 32 bits of registers before they are written."""
TEXT = """#include "machine.h"

int64_t static_shared_bytes(void) {{ return {shared}; }}
int64_t parameter_bytes(void) {{ return {parameters}; }}
int has_clocks(void) {{ return {clocks}; }}

void kernel(void) {{
{registers}
{body}
}}
"""


class Range(ctypes.Structure):
    """`Range` of machine/thread.h."""

    _fields_ = [("low", ctypes.c_uint64), ("bytes", ctypes.c_int64), ("name", ctypes.c_char_p), ("constant", ctypes.c_int64)]


class Launch(ctypes.Structure):
    """`Launch` of machine/thread.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("blocks", "threads", "across", "resident")),
        *((name, ctypes.c_int32) for name in ("checked", "late", "group", "fraction", "ulps", "range_count")),
        *(("seed", ctypes.c_uint64), ("dynamic_bytes", ctypes.c_int64), ("loops", ctypes.c_int64)),
        *(("ranges", ctypes.POINTER(Range)), ("error", ctypes.c_char_p), ("counts", ctypes.POINTER(ctypes.c_int64))),
        *(("numbers", ctypes.POINTER(ctypes.c_int32)), ("grid", ctypes.c_int32)),
    ]


def library_of(text: str, counted: bool = False) -> ctypes.CDLL:
    """Return the library of the kernel in PTX `text`. Raises UnknownPTX, and RuntimeError with the compiler's message.

    A kernel has thousands of lines that run once or twice: optimizing them would take longer than running them does.
    """
    flags = (*FLAGS, *(("-DCOUNTED",) if counted else ()))
    path = _folder() / f"{_digest(text, *flags)}.so"
    if not path.exists():
        own = "-O0", "-DKERNEL", "-shared", *flags, "-x", "c", "-"
        _compile((*own, "-x", "none", str(_machine(flags)), "-lm"), path, translate(text))
    return _loaded(path)


@cache
def _machine(flags: tuple[str, ...]) -> Path:
    path = _folder() / f"machine-{_digest(*flags)}.o"
    if not path.exists():
        _compile(("-O2", "-c", *flags, str(MACHINE / "machine.c")), path)
    return path


def _compile(options: tuple[str, ...], path: Path, code: str = "") -> None:
    """Run gcc. Other processes see the whole result or none."""
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        built = Path(folder, path.name)
        command = ["gcc", *options, "-o", str(built)]
        done = subprocess.run(command, input=code, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        built.replace(path)


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    os.utime(path)
    return ctypes.CDLL(str(path))


@cache
def _folder() -> Path:
    BUILD.mkdir(exist_ok=True)
    for path in BUILD.glob("*.*o"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > WEEK:
                path.unlink()
    return BUILD


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((*parts, *_sources())).encode()).hexdigest()[:24]


@cache
def _sources() -> tuple[str, ...]:
    texts = (path.read_text() for path in sorted((*HERE.glob("*.py"), *MACHINE.glob("*.[ch]"))))
    return subprocess.check_output(["gcc", "--version"], text=True), *texts


def translate(text: str) -> str:
    """Write the kernel in PTX `text` in C, with an array for each kind of register. Raises UnknownPTX."""
    kernel = parse(text)
    names = names_of(kernel)
    registers = "\n".join(_declarations(kernel.registers, names.held))
    body = "\n".join(_line(statement, names) for statement in kernel.body)
    end = max((one.offset + one.bytes for one in kernel.parameters), default=0)
    clocks = int(any(isinstance(one, Instruction) and _needs_clocks(one) for one in kernel.body))
    return TEXT.format(shared=names.shared_bytes, parameters=end, registers=registers, body=body, clocks=clocks)


def _needs_clocks(instruction: Instruction) -> bool:
    """Return True if some threads of a block wait for some others."""
    is_barrier = instruction.opcode.startswith("bar") and instruction.operands == ("0",)
    return not is_barrier and rule_of(instruction.opcode)[0] in hopper.RULES


def _declarations(registers: dict[str, str], held_registers: frozenset[str]) -> Iterator[str]:
    counts = {name: number + 1 for name, number in sorted(map(place, registers))}
    types = {place(register)[0]: type for register, type in registers.items()}
    for name, type in types.items():
        if type not in REGISTER_TYPES:
            raise UnknownPTX(f"registers of type {type}")
        yield f"    {REGISTER_TYPES[type]} {name}[{counts[name] + counts[name] % 2}];"
        yield f"    wmemset((wchar_t *){name}, {UNSET[type]}, sizeof {name} / sizeof(wchar_t));"
    yield from (f"    Held {name}_held[{counts[name]}] = {{}};" for name in {place(register)[0] for register in held_registers})


def _line(statement: Instruction | Label, names: Names) -> str:
    if isinstance(statement, Label):
        return f"{statement.name}:;"
    try:
        rule, named = rule_of(statement.opcode)
        c = rule.c(Use(statement, named, names))
    except UnknownPTX as error:
        raise UnknownPTX(f"line {statement.line}: {statement.opcode} {', '.join(statement.operands)}: {error}") from None
    if not statement.opcode.startswith("wgmma.mma_async"):
        touched = names.held.intersection(registers_of(statement))
        c = " ".join((*(f"touch_register(&{held(one)}, {statement.line});" for one in sorted(touched)), c))
    if not statement.guard:
        return f"    {c}"
    return f"    if ({'!' * statement.guard.startswith('!')}{variable(statement.guard.lstrip('!'))}) {{ {c} }}"


def is_known(opcode: str) -> bool:
    return any(re.fullmatch(rule.opcode, opcode) for rule in RULES)


@cache
def rule_of(opcode: str) -> tuple[Rule, dict[str, str]]:
    """Return the rule of an opcode, and the named parts of it. Raises UnknownPTX."""
    for rule in RULES:
        if matched := re.fullmatch(rule.opcode, opcode):
            return rule, matched.groupdict()
    raise UnknownPTX("an unknown instruction")
