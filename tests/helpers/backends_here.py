"""Backends to test on each device."""

import torch

from dilkit import list_backends
from dilkit.registry import Broken, backends

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def on(device: str) -> list[str]:
    known = ((name, backends()[name]) for name in list_backends())
    whole = [(name, backend.limits.devices) for name, backend in known if not isinstance(backend, Broken)]
    return [name for name, devices in whole if devices is None or device in devices]


BACKENDS_AND_DEVICES = [(name, device) for device in DEVICES for name in on(device)]
