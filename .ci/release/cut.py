"""Cuts a version: everything that names it is written again, and nothing is committed or published.

    python .ci/release/cut.py 0.3.0

What is under Unreleased in CHANGELOG.md becomes the version's; `dilkit.__version__`, CITATION.cff and the generated pages follow.
"""

import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EMPTY = "## [Unreleased]\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        print("cut.py: give one version, such as 0.3.0", file=sys.stderr)
        return 2
    return cut(arguments[0], datetime.datetime.now(datetime.timezone.utc).date().isoformat())


def cut(version: str, day: str) -> int:
    """Write `version`, released on `day`, wherever it stands; 1 where the checkout is not one that a version can be cut from."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.search(r"^## \[(\d[^\]]*)\]", changes, re.MULTILINE)
    unreleased = changes.partition(EMPTY)[2].partition("\n## [")[0]
    if released is None or _parts(released[1]) >= _parts(version):
        return _refuse(f"{version} is not newer than {released and released[1]}, the newest in CHANGELOG.md")
    if not unreleased.strip():
        return _refuse("nothing is under Unreleased in CHANGELOG.md: there is nothing to release")
    if _output("git", "status", "--porcelain", "--untracked-files=no"):
        return _refuse("files of the checkout have changes; commit them, or put them back")
    _replace("CHANGELOG.md", re.escape(EMPTY), f"{EMPTY}\n## [{version}] - {day}\n")
    _replace("dilkit/__init__.py", r'^__version__ = ".*"$', f'__version__ = "{version}"')
    _replace("CITATION.cff", r"^version: .*$", f"version: {version}")
    _replace("CITATION.cff", r"^date-released: .*$", f'date-released: "{day}"')
    subprocess.run([sys.executable, "-m", "dilkit.tools.site.pages"], cwd=ROOT, check=True)
    print(f"{version} is cut. Look at git diff, run make wheel and make test-all, commit, and push the tag v{version}.")
    return 0


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _replace(name: str, pattern: str, text: str) -> None:
    path = ROOT / name
    path.write_text(re.sub(pattern, lambda match: text, path.read_text(), count=1, flags=re.MULTILINE))


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _refuse(why: str) -> int:
    print(f"cut.py: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
