"""Fields of every result, and the environment that it was measured in. Times are in seconds, memory is in bytes."""

import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import dilkit
from dilkit.device import Device, probe
from dilkit.threads import usable_cores


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Facts on which a figure depends besides the problem."""

    device: str
    device_name: str
    features: tuple[str, ...] = ()
    memory_bytes: int | None = None
    capability: str | None = None
    cuda: str | None = None
    cpu: str
    cores: int
    threads: int
    system: str
    python: str
    torch: str
    numpy: str
    dilkit: str
    git_revision: str | None
    git_dirty: bool | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run of a command: one JSON file. Files of another schema are refused."""

    KIND: ClassVar[str]
    SCHEMA: ClassVar[int] = 1

    schema: int = 1
    kind: str
    command: str
    date: str
    environment: Environment


def now() -> str:
    """Return the time (UTC) in the format of results."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def environment(device: Device) -> Environment:
    """Return the facts besides the problem on which a figure measured on `device` depends."""
    import torch

    revision, dirty = git_state(Path(dilkit.__file__).parent.parent)
    return Environment(
        device=device.type,
        device_name=device.name,
        features=tuple(sorted(device.features)),
        memory_bytes=device.memory,
        capability=f"{device.capability[0]}.{device.capability[1]}" if device.capability else None,
        cuda=torch.version.cuda if device.capability else None,
        cpu=probe("cpu").name,
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=metadata.version("torch"),
        numpy=metadata.version("numpy"),
        dilkit=dilkit.__version__,
        git_revision=revision,
        git_dirty=dirty,
    )


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the revision of the checkout in `folder`, and True if tracked files differ from it; both None outside one.

    Results, and the pages and pictures made of them, do not count.
    """

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    if not (folder / ".git").exists():
        return None, None
    code = (".", ":(exclude)docs", ":(exclude)README.md")
    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no", "--", *code))
    except (OSError, subprocess.SubprocessError):
        return None, None
