"""Records: short texts that ranks share, with a checksum and the version of dilkit of the rank that sent them.

    checksum (4 bytes)  length (2)  version  NUL  record  NULs up to `RECORD_BYTES`

The checksum is that of all between it and the last NULs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

from dilkit import __version__
from dilkit.comm.transports.errors import PeerLost, PlanMismatch, ranks_text

RECORD_BYTES = 1024
LONGEST_VERSION = 31
LONGEST_RECORD = RECORD_BYTES - 7 - LONGEST_VERSION
VERSION = __version__.encode()[:LONGEST_VERSION]


def packed(record: bytes, version: bytes) -> bytes:
    """Pack a record into `RECORD_BYTES` bytes."""
    content = version + b"\0" + record
    text = len(content).to_bytes(2, "little") + content
    return (crc32(text).to_bytes(4, "little") + text).ljust(RECORD_BYTES, b"\0")


def unpacked(rows: Sequence[bytes], step: str) -> list[bytes]:
    """Return the records of all ranks, by rank. Raises `PeerLost` for a wrong checksum, `PlanMismatch` if versions differ."""
    sent = [_content(row, rank, step).partition(b"\0") for rank, row in enumerate(rows)]
    versions = [version for version, _, _ in sent]
    common = max(versions, key=versions.count)
    if odd := [rank for rank, version in enumerate(versions) if version != common]:
        verb = "runs" if len(odd) == 1 else "run"
        raise PlanMismatch(
            f"{step}: {ranks_text(odd)} {verb} dilkit {_shown(versions[odd[0]])}, the others {_shown(common)}; install the same "
            "version for all ranks",
            odd,
            step,
        )
    return [record for _, _, record in sent]


def _content(row: bytes, rank: int, step: str) -> bytes:
    text = row[4 : 6 + int.from_bytes(row[4:6], "little")]
    if crc32(text).to_bytes(4, "little") != row[:4]:
        raise PeerLost(
            f"{step}: the record of rank {rank} was damaged on its way; do all ranks run the same version?", [rank], step
        )
    return text[2:]


def _shown(version: bytes) -> str:
    """Up to 0.2.0 what stands before the first NUL is the record itself."""
    text = version.decode(errors="replace")
    return text if re.fullmatch(r"[\w.+!-]+", text) else "from before records had versions"
