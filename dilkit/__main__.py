"""The `dilkit` command, and `python -m dilkit`. An interruption while it is being loaded leaves no traceback."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any


def main() -> int:
    """Run the command line of this process; its exit code."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, _end)
    cli = importlib.import_module("dilkit.tools.cli")  # by name, because the core must not depend on the tools
    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code: int = cli.main()
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def _end(*_: Any) -> None:
    os.write(2, b"dilkit: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
