"""The file of measured orders with any byte flipped, or cut anywhere: it is refused by name, or read as what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilkit.selection.tuned_file import TunedEntry, TunedError, TunedSetup, TunedShape, load, to_text

ENTRY = TunedEntry(
    TunedSetup("cpu", "a processor", "none", "2", "1"),
    TunedShape("float32", 64, True, False, "8/1", 1024),
    (("native", 0.5), ("sdpa", 1.25)),
)


def read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    complaint, entries = f"{path}: ", ()
    try:
        entries = load(path)
    except TunedError as error:
        complaint = str(error)
    assert complaint.startswith(f"{path}: ")
    assert all(isinstance(entry, TunedEntry) for entry in entries)


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_any_flipped_byte(flip: int, tmp_path: Path) -> None:
    content = to_text([ENTRY]).encode()
    for place in range(len(content)):
        read(tmp_path / "tuned.json", content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])


def test_any_length(tmp_path: Path) -> None:
    content = to_text([ENTRY, ENTRY]).encode()
    for length in range(len(content) - 1):
        (tmp_path / "tuned.json").write_bytes(content[:length])
        with pytest.raises(TunedError, match=r"tuned\.json: "):
            load(tmp_path / "tuned.json")
    read(tmp_path / "tuned.json", content)
