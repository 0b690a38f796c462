"""Can this Python make a virtual environment and build an extension? Says what is missing and how to get it.

`machine.py --reused`: is it in an environment with torch already? Prints the folder that the state of that one is noted in.
`make` runs it with the chosen interpreter before anything is installed, so it must run on any Python 3, however old.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig

OLDEST = (3, 10)


def missing():
    """Return what the machine lacks, each with the Debian package that has it."""
    found = []
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031  (old Pythons read this file)
    if sys.version_info[:2] < OLDEST:
        found.append(
            (
                "Python >= 3.10 (this is " + version + " at " + sys.executable + ")",
                "python3, or choose one: make PYTHON=python3.12",
            )
        )
    if not importable("venv") or not importable("ensurepip"):
        found.append(("the modules venv and ensurepip of Python " + version, "python3-venv"))
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):  # noqa: PTH110, PTH118
        found.append(("the header Python.h of Python " + version, "python3-dev"))
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        found.append(("the C compiler " + compiler, "gcc"))
    return found


def importable(module):
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def reused():
    """A name for the environment of this Python, made again or not, if it is virtual, has torch and is not the checkout's own."""
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".venv")  # noqa: PTH100, PTH118, PTH120
    virtual = sys.prefix != sys.base_prefix and os.path.realpath(sys.prefix) != os.path.realpath(own)
    if not virtual or importlib.util.find_spec("torch") is None:
        return ""
    made = os.stat(os.path.join(sys.prefix, "pyvenv.cfg")).st_mtime  # noqa: PTH116, PTH118
    return "build/reused/" + hashlib.sha1((sys.prefix + str(made)).encode()).hexdigest()[:12]


def main():
    found = missing()
    for what, package in found:
        print("missing: " + what + "   (Debian/Ubuntu package: " + package + ")")
    if found:
        print("On Debian or Ubuntu: sudo apt-get install python3-venv python3-dev gcc make")
        print("For a Python that is not the system's, its own packages: python3.12-venv python3.12-dev")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(print(reused()) if "--reused" in sys.argv else main())
