"""Commands on files that cannot be read."""

import contextlib
import os
import resource
import shlex
import sys
from pathlib import Path

import pytest
from helpers.forks import in_child
from helpers.result_files import FOLDER

from dilkit.tools import cli

pytestmark = pytest.mark.surroundings

CPU, SLIDES = (shlex.quote(str(FOLDER / f"{name}.json")) for name in ("cpu-intel-xeon-avx2", "slides"))
COMMANDS = {
    "report": "report {odd}",
    "compare": f"compare {CPU} {{odd}}",
    "text": f"demo --text {CPU} {{odd}} --out {{out}}",
    "picture": "demo --image {odd} --out {out}",
    "model": "demo --sample x --checkpoint {odd}",
    "pattern": "info --pattern {odd}",
    "speeds": "plan --seq 4096 --world-size 2 --speeds {odd}",
}


@pytest.fixture(params=["endless", "pipe", "absent", "large"])
def odd(request, tmp_path):
    path = tmp_path / "odd"
    if request.param == "endless":
        return Path("/dev/zero")
    if request.param == "pipe":
        os.mkfifo(path)
    if request.param == "large":
        with path.open("wb") as file:
            file.truncate(5 * 1024**3)  # takes no room on the disk
    return path


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_what_is_no_file_is_refused_in_one_line(command, odd, tmp_path, capsys):
    if "--image" in command:
        pytest.importorskip("PIL", reason="pictures are read by Pillow")
    assert cli.main(shlex.split(command.format(odd=shlex.quote(str(odd)), out=shlex.quote(str(tmp_path / "out"))))) == 2
    said = capsys.readouterr().err
    assert str(odd) in said
    assert len(said.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the size of files stands in for a full disk")
@pytest.mark.parametrize("command", [f"report {SLIDES} --html page.html", "draw --seq 64 --heads 2 --segments 8 --out draw.svg"])
def test_a_full_disk_keeps_the_old_file(command, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need it")
    name, folder, errors = command.split()[-1], tmp_path / "full", tmp_path / "errors"
    folder.mkdir()
    (folder / name).write_text("old")

    def with_a_full_disk():
        os.chdir(folder)
        sys.dont_write_bytecode = True  # Python 3.11 keeps what it could not write whole, and cannot import it again
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with errors.open("w") as file, contextlib.redirect_stderr(file):
            assert cli.main(shlex.split(command)) == 2

    assert in_child(with_a_full_disk) == "done"
    (said,) = errors.read_text().splitlines()
    assert "File too large" in said
    assert name in said
    assert (folder / name).read_text() == "old"
    assert [path.name for path in folder.iterdir()] == [name]
