"""Commands that are killed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from helpers.result_files import FOLDER
from PIL import Image

from dilkit.environment import TUNED
from dilkit.selection import tuned_file
from dilkit.tools.demo.transformer import load_model
from dilkit.tools.report import registry

SMALL = "--seq 64 --heads 2 --dim 8 --segments 16,64 --rates 1,2 --repeats 2 --backend native,reference"
COMMANDS = {
    "demo": ("demo --steps 4 --context 64 --text {text} --out {out}", signal.SIGKILL),
    "bench": ("bench --suite orders --quick --out {out}", signal.SIGTERM),
    "tune": (f"tune {SMALL}", signal.SIGINT),
    "report": (f"report {FOLDER}/cpu-intel-xeon-avx2.json --html {{out}}/page.html --md {{out}}/page.md", signal.SIGKILL),
}
CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
START = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from dilkit.tools.cli import main; "


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize(("command", "number"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_is_ended_leaves_whole_files_or_none(command, number, tmp_path):
    """The first run measures the time; the last one goes on from the files of killed ones."""
    out = tmp_path / "out"
    for folder in (out, tmp_path / "text"):
        folder.mkdir()
    for letter in "abcdefgh":
        (tmp_path / "text" / letter).write_text(f"{letter} is a letter of the alphabet. " * 40)
    arguments = command.format(out=out, text=tmp_path / "text").split()
    environment = {**os.environ, TUNED.name: str(out / "tuned.json"), "OMP_NUM_THREADS": "1"}

    def run(moment):
        program = [sys.executable, "-c", f"{START}sys.exit(main(sys.argv[1:]))", *arguments]
        with subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                return process.wait(moment), ""
            except subprocess.TimeoutExpired:
                process.send_signal(number)
            said = process.communicate(timeout=120)[1]
            return process.returncode, said

    started = time.monotonic()
    assert run(240.0)[0] == 0
    lasts = time.monotonic() - started
    code, said = run(lasts * random.Random(command).uniform(0.5, 1.0))
    assert code in (CODES[number], -number, 0, 1), said  # or it had not begun, or had ended by itself
    assert "Traceback" not in said
    strays = [path for path in out.iterdir() if path.name.startswith(".")]
    assert not strays or number == signal.SIGKILL
    for path in out.iterdir():
        if path not in strays:
            read(path)
    assert run(240.0)[0] == 0


def read(path):
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
        text = path.read_text().rstrip()
        assert text.endswith("</html>") if path.suffix == ".html" else text, path
