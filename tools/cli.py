"""The `dilkit` command. Standard library only: a command's module is imported when that command runs or its help is shown.

A command is a module with `HELP`, `add_arguments(parser)` and `run(args) -> int`. `--json` is added
here, to every command. What a command raises becomes one line on stderr and an exit code; where the command was started several
times at once, by mpirun or torchrun, the first process prints it for all.
"""

import argparse
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

import dilkit
from dilkit import NoBackendError, environment
from dilkit.files import why_not
from dilkit.tools.console.interrupt import INTERRUPTED, TERMINATED, terminable
from dilkit.tools.console.text import with_nearest

COMMANDS = {
    "info": ("", "--assume h100 --dtype bf16 --train"),
    "doctor": ("", "--json"),
    "plan": ("--seq 1M --ranks 8", "--pattern 'longformer(512, 16)' --seq 64K --simulate"),
    "order": ("--shape 64x64", "--shape 33x45x80 --curve morton --segments 1024"),
    "verify": ("", "--backend native,sdpa --pattern 'mistral(16)'"),
    "bench": ("--seq 4K", "--seq 16K,64K --pattern 'longformer(512, 16)' --train --out results"),
    "report": ("results/bench.json", "results/bench.json --html report.html"),
    "compare": ("before/bench.json after/bench.json", "before/bench.json after/bench.json --all"),
    "tune": ("", "--seq 16K --dtype bf16 --device cuda"),
    "draw": ("--segments 16,32,64", "--pattern 'longformer(8, 2)' --out pattern.png"),
    "demo": ("--minutes 2", "--llama --minutes 5 --out demo"),
    "encode-slide": (
        "features --checkpoint slide_encoder.pth --out embeddings",
        "slide.h5 --checkpoint slide_encoder.pth --out embeddings --heatmap",
    ),
    "finetune-slide": ("labels.csv features --checkpoint encoder.pth --out run", "labels.csv features --out run --resume"),
    "predict-slide": (
        "features --checkpoint run/model.pt --out predictions",
        "slide.h5 --checkpoint run/model.pt --out predictions --heatmap",
    ),
}
"""Commands, each with a module in `dilkit.tools.commands`, and the arguments of two examples."""
GRACE = 5.0
"""Seconds that the other ranks leave the first one to say what is wrong; launchers end them as soon as it has."""
DONE, NO, BAD_INPUT = 0, 1, 2

_EXIT_CODES = """\
exit codes:
  0    done
  1    the answer is no: no backend can compute the call, or a check failed
  2    bad arguments, bad input, or a part of the installation is missing
  130  interrupted

`dilkit COMMAND --help` says more; `--json` makes any command print one JSON object with a "schema" number instead."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, `dilkit info: --assume: ...`, and exit with 2."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line on stderr and exit."""
        text = f"{self.prog}: {with_nearest(message.removeprefix('argument '), self._option_string_actions)}\n"
        self.exit(BAD_INPUT, text if environment.first_of_all() else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit code."""
    open_streams()
    with terminable() as terminated:
        code = _main(list(sys.argv[1:] if argv is None else argv))
    return TERMINATED if terminated.is_set() and code == INTERRUPTED else code


def _main(argv: list[str]) -> int:
    try:
        if argv and argv[0] in COMMANDS:
            return _run(argv[0], argv[1:])
        parser = Parser("dilkit", usage="dilkit COMMAND ...", epilog=_EXIT_CODES)
        parser.add_argument("--version", action="version", version=f"dilkit {dilkit.__version__}")
        parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
        if argv and argv[0] not in ("-h", "--help"):
            parser.parse_args(argv)
        lines = "\n".join(f"  {name:<14} {_first_line(name)}" for name in COMMANDS)
        parser.description = f"{(dilkit.__doc__ or '').partition(chr(10))[0]}\n\ncommands:\n{lines}"
        parser.print_help()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else BAD_INPUT
    except KeyboardInterrupt:
        return _fail("dilkit", "interrupted", INTERRUPTED)
    return DONE if argv else BAD_INPUT


def command(name: str) -> ModuleType:
    return importlib.import_module(f"dilkit.tools.commands.{name.replace('-', '_')}")


def parser_of(name: str) -> Parser:
    module = command(name)
    examples = "".join(f"\n  dilkit {name} {arguments}".rstrip() for arguments in COMMANDS[name])
    parser = Parser(f"dilkit {name}", description=module.HELP, epilog=f"examples:{examples}")
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    return parser


def _run(name: str, argv: list[str]) -> int:
    prog = f"dilkit {name}"
    try:
        parser, run = parser_of(name), command(name).run
    except Exception as error:
        return _fail(prog, _why_not_loaded(error, "this command cannot be loaded"), BAD_INPUT)
    try:
        args = parser.parse_args(argv)
        if name != "doctor":  # which shows what is malformed
            environment.check()
        code: int = run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `dilkit info | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO
    except ImportError as error:
        return _fail(prog, _why_not_loaded(error, "a part of the installation cannot be used"), BAD_INPUT)
    except OSError as error:
        return _fail(prog, str(error) if error.filename is None else f"{str(error.filename)!r} {why_not(error)}", BAD_INPUT)
    except (ValueError, TypeError) as error:
        return _fail(prog, str(error), NO if isinstance(error, NoBackendError) else BAD_INPUT)


def _fail(prog: str, message: str, code: int) -> int:
    """Only the first rank prints. The others give it time: a launcher ends the whole job as soon as one rank has failed."""
    if environment.first_of_all():
        print(f"{prog}: {message}", file=sys.stderr)
    else:
        time.sleep(GRACE)
    return code


def _first_line(name: str) -> str:
    """Return a line on a command; one that cannot be loaded says so and hides no other."""
    try:
        return str(command(name).HELP).splitlines()[0]
    except Exception as error:
        return f"({_why_not_loaded(error, 'cannot be loaded')})"


def _why_not_loaded(error: Exception, what: str) -> str:
    """Return the fault, and the way out where only a checkout has the missing module."""
    absent = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if absent.startswith("dilkit.tools.") and not importlib.util.find_spec("dilkit.tools.site"):
        return f"needs a checkout: {absent} is not installed; `pip install -e .` in a clone of the repository has it"
    return f"{what}: {type(error).__name__}: {error}"


_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_streams() -> None:
    """Open the standard streams that are closed, to nowhere: else printing fails, and the next file takes their number."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(handle, handle == number)
            stream = open(handle, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    sys.exit(main())
