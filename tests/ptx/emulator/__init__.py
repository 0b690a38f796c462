"""PTX, executed on a CPU over numpy arrays as the PTX ISA says. README.md describes it; these names are all that is public."""

from ptx.emulator.emulator import MEASURED, Counts, Emulator, NotModelled, Options, PTXError, Rounding, Span, measured
from ptx.emulator.library import MACHINE
from ptx.emulator.parse import UnknownPTX

__all__ = [
    "MACHINE",
    "MEASURED",
    "Counts",
    "Emulator",
    "NotModelled",
    "Options",
    "PTXError",
    "Rounding",
    "Span",
    "UnknownPTX",
    "measured",
]
