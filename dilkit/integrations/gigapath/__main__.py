"""`python -m dilkit.integrations.gigapath run script.py args...`: a script, after `install()`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script as Python would: its `sys.argv`, `__main__` and exit code are its own."""
    parser = argparse.ArgumentParser(prog="python -m dilkit.integrations.gigapath")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script, in which GigaPath's create_model gives dilkit's slide encoder")
    run.add_argument("--backend", metavar="NAME", help="who computes attention (default: what suits the device)")
    flash = "let a module flash_attn of this version stand in where flash-attn is not installed, for packages that ask for it"
    run.add_argument("--flash-attn", metavar="VERSION", help=flash)
    run.add_argument("script", type=Path, metavar="SCRIPT", help="a file of Python, with its arguments after it")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")
    args = parser.parse_args(argv)
    if not args.script.exists():
        run.error(f"argument SCRIPT: {args.script} is not there")

    from dilkit.integrations.gigapath import install

    install(backend=args.backend, flash_attn=args.flash_attn)
    sys.argv = [str(args.script), *args.args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(args.script.resolve().parent)
    runpy.run_path(str(args.script), run_name="__main__")


if __name__ == "__main__":
    main()
