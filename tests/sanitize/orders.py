"""Runs the tests of dilkit/orders with AddressSanitizer and UBSan in a copy of the checkout."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sanitize.extensions import MISSING, build, environment, links


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--if-possible", action="store_true", help="a compiler without the sanitizers is no failure")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if not links(Path(folder)):
            print(f"orders: not run: {MISSING}", flush=True)
            return 0 if args.if_possible else 2
        copy = Path(folder, "copy")
        orders = [e for e in build(copy) if e.name.startswith("dilkit.orders.") and e.sources[1:]]
        tests = [f"tests/core/orders/test_{e.name.rpartition('._')[2]}.py" for e in orders]
        print(f"orders: {', '.join(tests)}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys", *tests, *options]
        return subprocess.run(command, cwd=copy, env={**os.environ, **environment(copy)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
