"""Commands that write files, ended by a signal at random moments, and what is left of their files then.

    python tests/tools/commands/killing.py VERB SIGNAL MOMENTS      # as: "demo --image" SIGKILL 20

prints one JSON object a moment, and one of a last run over what the others have left, which nothing ends. Children are forked
from a process that has imported torch already, so that moments are spent on the work of the command and not on its start.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds after a signal until a command is taken for hanging."""
START = 0.05
"""Seconds until a forked child surely handles signals."""
SMALL = "--seq 64 --heads 2 --dim 8 --segments 16,64 --rates 1,2 --repeats 2 --backend native,reference"
VERBS = {
    "demo": "demo --steps 4 --context 64 --text {text} --out {out} --save {out}/model.pt",
    "demo --image": "demo --image --steps 2 --out {out}",
    "bench": "bench " + SMALL + " --out {out}",
    "bench --suite orders": "bench --suite orders --quick --out {out}",
    "tune": "tune " + SMALL,
    "report": "report {results}/cpu.json --html {out}/page.html --md {out}/page.md",
    "draw": "draw --seq 32 --heads 2 --segments 8,16 --rates 1,2 --out {out}/draw.svg",
}
RESULTS = Path(__file__).parents[3] / "docs" / "results"


def killed(verb: str, number: int, moments: int) -> Iterator[dict[str, Any]]:
    """What became of `moments` runs of a verb: the moment, the exit code, files that are not whole, temporary files.

    A last run, whose moment is None, is not ended: it goes on from the files of the others, with --resume where that is offered.
    """
    import torch  # noqa: F401
    from matplotlib import figure  # noqa: F401

    from dilkit.tools import cli
    from dilkit.tools.report import picture, registry  # noqa: F401

    for name in cli.COMMANDS:
        cli.command(name)
    draw = random.Random(f"{verb} {number}")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        arguments = _arguments(verb, home)
        started = time.monotonic()
        code, said = _ended(cli.main, arguments, home, PATIENCE, 0)
        if code:
            raise RuntimeError(f"dilkit {verb} ends with {code} where nothing ends it: {said}")
        lasts = min(time.monotonic() - started, 15.0)
        for trial in range(moments):
            if trial % 2:  # else over the files of the runs before
                shutil.rmtree(home / "out")
                (home / "out").mkdir()
            moment = START + lasts * draw.uniform(0.0 if trial % 4 < 2 else 0.6, 1.05)
            started = time.monotonic()
            code, said = _ended(cli.main, arguments, home, moment, number)
            if code == 0:  # it had ended by itself: the machine is less busy than it was
                lasts = min(lasts, time.monotonic() - started)
            found = dict(moment=round(moment, 3), code=code, said=said[-300:], **left(home / "out"))
            yield found
            for stray in found["temporary"]:
                (home / "out" / stray).unlink()
        resume = [] if "--suite" not in arguments or not (home / "out" / "suite.json").exists() else ["--resume"]
        code, said = _ended(cli.main, [*arguments, *resume], home, PATIENCE, 0)
        yield dict(moment=None, code=code, said=said[-300:], **left(home / "out"))


def _arguments(verb: str, home: Path) -> list[str]:
    """The arguments of a verb, whose files and caches are below `home`."""
    for name in ("out", "text"):
        (home / name).mkdir()
    for letter in "abcdefgh":
        (home / "text" / letter).write_text(f"{letter} is a letter of the alphabet. " * 40)
    os.environ["DILKIT_TUNED"] = str(home / "out" / "tuned.json")
    return [word.format(out=home / "out", text=home / "text", results=RESULTS) for word in VERBS[verb].split()]


def _ended(main: Callable[[list[str]], int], arguments: list[str], home: Path, moment: float, number: int) -> tuple[int, str]:
    """The exit code and stderr of a forked child that runs `main`, with signal `number` at `moment`; 0 is no signal."""
    child = os.fork()
    if not child:
        code = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for stream, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(home / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            code = main(arguments)
        except BaseException as error:
            os.write(2, f"Traceback of {type(error).__name__}: {error}".encode())
        finally:
            os._exit(code)
    deadline = time.monotonic() + moment
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.002)
    if number:
        os.kill(child, number)
    deadline = time.monotonic() + PATIENCE
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1] * 0 + 999, "hangs"
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (home / "stderr").read_text()


def left(folder: Path) -> dict[str, list[str]]:
    """Files in a folder that their own reader does not take, and temporary files."""
    broken, temporary = [], []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if path.name.startswith("."):
            temporary.append(str(path.relative_to(folder)))
            continue
        try:
            read(path)
        except Exception as error:
            broken.append(f"{path.name}: {type(error).__name__}: {error}")
    return dict(broken=broken, temporary=temporary)


def read(path: Path) -> None:
    """Read a file as what it is; raises for one that is not whole."""
    from PIL import Image

    from dilkit.selection import tuned_file
    from dilkit.tools.demo.text.model import load_model
    from dilkit.tools.report import registry

    if path.name == "tuned.json":
        tuned_file.load(path)
    elif path.suffix == ".json":
        registry.sections_of([path])
    elif path.suffix == ".pt":
        load_model(path)
    elif path.suffix == ".png":
        with Image.open(path) as opened:
            opened.load()
    else:
        text = path.read_text()
        end = {".html": "</html>", ".svg": "</svg>"}.get(path.suffix, "")
        if not text.rstrip().endswith(end) or not text.strip():
            raise ValueError(f"ends with {text[-20:]!r}")


if __name__ == "__main__":
    for one in killed(sys.argv[1], signal.Signals[sys.argv[2]], int(sys.argv[3])):
        print(json.dumps(one), flush=True)
