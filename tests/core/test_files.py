"""Files are read only where that ends, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dilkit import Pattern, Problem, explain, files
from dilkit.comm import load_shard, run_threads

REFUSED = r"no regular file|directory"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize(
    "which", [lambda folder: Path("/dev/zero"), pipe, lambda folder: folder], ids=["endless", "pipe", "folder"]
)
def test_only_regular_files_are_read(which, tmp_path, monkeypatch):
    path = which(tmp_path)
    with pytest.raises(OSError, match=REFUSED):
        files.read_bytes(path)
    with pytest.raises(OSError, match=REFUSED):
        run_threads(1, lambda comm: load_shard(path, comm, dtype="uint8"))
    monkeypatch.setenv("DILKIT_TUNED", str(path))
    with pytest.warns(UserWarning, match="is ignored"):
        explain(Problem(pattern=Pattern([8], [1]), seq=64, heads=2, head_dim=4))


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)
    with pytest.raises(OSError, match="at most 268,435,456 are read"):
        files.read_bytes(tmp_path / "large")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path, link = tmp_path / "result", tmp_path / "link"
    path.write_bytes(b"before")
    link.symlink_to(path)
    with pytest.raises(TypeError), files.replacing(path) as file:
        file.writelines([b"half", "no bytes"])
    assert (path.read_bytes(), sorted(x.name for x in tmp_path.iterdir())) == (b"before", ["link", "result"])
    with files.replacing(link) as file:
        file.write(b"after")
    assert (path.read_bytes(), link.is_symlink()) == (b"after", True)


def test_a_device_is_written_to_and_stays_a_device():
    with files.replacing(Path("/dev/null")) as file:
        file.write(b"nothing")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o775, True), (0o777, True), (0o1777, True)])
def test_why_others_may_write(mode, refused, tmp_path):
    tmp_path.chmod(mode)
    assert bool(files.why_others_may_write(tmp_path)) == refused
    assert not files.why_others_may_write(tmp_path / "absent")
