"""Runs zizmor, which knows what makes a workflow unsafe or wrong, on `.github`. `make lint` calls it."""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    command = [Path(sysconfig.get_path("scripts"), "zizmor"), "--offline", "--no-progress", "--quiet", ".github"]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
