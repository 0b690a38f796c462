"""The environment that a result was measured in: device, versions, and the revision of the checkout."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import dilkit
from dilkit.device import Device, probe
from dilkit.threads import usable_cores
from dilkit.tools.results.record import Environment


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
