"""Files are read only where that ends, and written whole or not at all."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers.forks import in_child

from dilkit import Pattern, Problem, explain, files
from dilkit.comm import load_shard, run_threads

REFUSED = r"no regular file|directory"


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize(
    "which", [lambda folder: Path("/dev/zero"), pipe, lambda folder: folder], ids=["endless", "pipe", "folder"]
)
def test_only_regular_files_are_read(which, tmp_path, monkeypatch):
    path = which(tmp_path)
    with pytest.raises(OSError, match=REFUSED) as caught:
        files.read_bytes(path)
    assert caught.value.filename == str(path)
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
    path, link = tmp_path / "new" / "folder" / "result", tmp_path / "link"
    with files.replacing(path) as file:
        file.write(b"before")
    link.symlink_to(path)
    with pytest.raises(TypeError), files.replacing(path) as file:
        file.writelines([b"half", "no bytes"])
    assert (path.read_bytes(), [*path.parent.iterdir()]) == (b"before", [path])
    with files.replacing(link) as file:
        file.write(b"after")
    assert (path.read_bytes(), link.is_symlink()) == (b"after", True)


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the size of files stands in for a full disk")
def test_a_disk_that_fills_up_keeps_the_checkpoint_before(tmp_path):
    """torch.save hides what the disk says behind an error of its own."""
    import resource

    path = tmp_path / "checkpoint.pt"

    def save(size):
        with files.replacing(path) as file:
            torch.save({"weights": torch.full((size,), 1.0)}, file)

    def twice():
        save(100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        said = r"File too large after [\d,]+ bytes; what was there before is as it was: '.*/checkpoint.pt'"
        with pytest.raises(OSError, match=said):
            save(100_000)

    assert in_child(twice) == "done"
    assert torch.load(path, weights_only=True)["weights"].tolist() == [1.0] * 100
    assert [x.name for x in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_disk_that_says_at_last_that_it_is_full(tmp_path, monkeypatch):
    path = tmp_path / "result"
    path.write_bytes(b"before")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device after 5 bytes; .*: '.*/result'"), files.replacing(path) as file:
        file.write(b"after")
    assert (path.read_bytes(), [x.name for x in tmp_path.iterdir()]) == (b"before", ["result"])


def test_a_device_is_written_to_and_stays_a_device():
    with files.replacing(Path("/dev/null")) as file:
        file.write(b"nothing")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o775, True), (0o777, True), (0o1777, True)])
def test_why_others_may_write(mode, refused, tmp_path):
    tmp_path.chmod(mode)
    assert bool(files.why_others_may_write(tmp_path)) == refused
    assert not files.why_others_may_write(tmp_path / "absent")
