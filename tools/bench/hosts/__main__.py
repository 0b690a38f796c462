"""`make hosts`: `dilkit bench --suite hosts`, with the options given; skipped where this machine can have no hosts."""

import sys

from dilkit.tools import cli
from dilkit.tools.bench.hosts import network

if why := network.why_not():
    print(f"make hosts: skipped: {why}")
else:
    sys.exit(cli.main(["bench", "--suite", "hosts", *sys.argv[1:]]))
