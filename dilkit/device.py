"""Facts about a device: a hashable value, no tensors, no handle to the hardware. So any GPU can be assumed on any machine."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dilkit.checks import shown

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]


def check_capability(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a compute capability such as (8, 0), or None."""
    pair = isinstance(value, tuple) and [*map(type, value)] == [int, int]
    if value is not None and not pair:
        needed = "a pair (major, minor) is needed, such as (8, 0), or None"
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; {needed}")


@dataclass(frozen=True)
class Device:
    """Facts about the device that a call runs on: a hashable value without a handle to the hardware.

    `dilkit.device.probe("cuda", 0)` describes a device of this machine, `Device.assume("sm_90")` one that need not be there.

    Example, which backend an H100 would run:

        >>> from dilkit import Device, Pattern, Problem, explain
        >>> device = Device.assume("sm_90")
        >>> device.type, device.capability, "wgmma" in device.features
        ('cuda', (9, 0), True)
        >>> pattern = Pattern([2048, 8192], [1, 4])
        >>> problem = Problem(pattern=pattern, seq=8192, heads=8, head_dim=64, dtype="bfloat16", device=device)
        >>> "sm_90" in str(explain(problem))
        True
    """

    type: str
    """torch's device type: "cpu", "cuda", ..."""
    name: str
    """The name of the processor or GPU, for people."""
    capability: Capability | None = None
    """The CUDA compute capability, such as (8, 0); None for other devices."""
    features: frozenset[str] = frozenset()
    """Instruction sets and hardware units, such as "avx2" and "fp16_tensor_cores"."""
    memory: int | None = None
    """Bytes of memory; None if unknown."""
    index: int = 0
    """torch's index of the device."""
    torch_code: bool | None = None
    """True if the installed torch contains code for the device; None if that was not looked up."""
    assumed: bool = False
    """True if the facts were assumed rather than looked up."""
    architecture: str = ""
    """The architecture of an AMD GPU, such as "gfx942", which has no CUDA compute capability; empty for other devices."""

    def __post_init__(self) -> None:
        for name in ("type", "name"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; a text is needed")
        check_capability("capability", self.capability)
        if not isinstance(features := self.features, frozenset):
            raise TypeError(f"features={shown(features)} is a {type(features).__name__}; a frozenset of names is needed")

    @property
    def platform(self) -> str:
        """The device's platform: "hip" on AMD's GPUs, which torch calls "cuda"; else `type`."""
        return "hip" if self.architecture else self.type

    @classmethod
    def assume(cls, text: str) -> Device:
        """Return the facts of a device that need not be there: "sm_61", "6.1", "gtx1080", "gfx942" or "cpu".

        Raises ValueError for any other text and TypeError for anything but a text.
        """
        if text == "cpu":
            return replace(probe("cpu"), assumed=True)
        if isinstance(text, str) and re.fullmatch(r"gfx[0-9a-f]{3,5}", text):
            return cls("cuda", "AMD", architecture=text, assumed=True)
        capability = parse_capability(text)
        generation = generation_of(capability)
        known = "" if generation.capability == capability else "like "
        return cls("cuda", f"{known}{generation.example}", capability, features_of(capability), assumed=True)

    def __str__(self) -> str:
        if self.capability is None:
            return f"{self.platform} ({', '.join(filter(None, (self.name, self.architecture)))})"
        where = "assumed" if self.assumed else f"{self.type}:{self.index}"
        return f"{where} ({self.name}, sm_{self.capability[0]}{self.capability[1]})"


@dataclass(frozen=True)
class Generation:
    """The features of every CUDA device of one compute capability."""

    capability: Capability
    architecture: str
    example: str
    features: frozenset[str]


_MAXWELL = frozenset({"fp16_storage"})
_TENSOR_CORES = _MAXWELL | {"fp16_arithmetic", "fp16_tensor_cores"}
_AMPERE = _TENSOR_CORES | {"bf16", "tf32", "async_copy"}
_HOPPER = _AMPERE | {"fp8", "tma", "wgmma"}

_OF_ONE_MAJOR = frozenset({"wgmma", "tcgen05"})
"""Features that later major versions have dropped each time."""

GENERATIONS = (
    Generation((5, 2), "Maxwell", "GTX 980", _MAXWELL),
    Generation((6, 0), "Pascal", "Tesla P100", _MAXWELL | {"fp16_arithmetic"}),
    Generation((6, 1), "Pascal", "GTX 1080", _MAXWELL),
    Generation((7, 0), "Volta", "Tesla V100", _TENSOR_CORES),
    Generation((7, 5), "Turing", "Tesla T4", _TENSOR_CORES),
    Generation((8, 0), "Ampere", "A100", _AMPERE),
    Generation((8, 6), "Ampere", "RTX 3090", _AMPERE),
    Generation((8, 9), "Ada", "RTX 4090", _AMPERE | {"fp8"}),
    Generation((9, 0), "Hopper", "H100, H200", _HOPPER),
    Generation((10, 0), "Blackwell", "B200", (_HOPPER - {"wgmma"}) | {"tcgen05"}),
    Generation((12, 0), "Blackwell", "RTX 5090", _HOPPER - {"wgmma"}),
)


SLOW_HALVES = (
    ("bfloat16", (0, 0), "no GPU below 8.0 has bfloat16 units"),
    ("float16", (6, 2), "the float16 units of this GPU are fast but also sum in float16, which loses small weights"),
    ("float16", (6, 1), "the float16 units of this GPU run at 1/64 of the float32 rate"),
    ("float16", (6, 0), "the float16 units of this GPU are fast but also sum in float16, which loses small weights"),
    ("float16", (0, 0), "there is no float16 arithmetic on this GPU; what it saves is memory"),
)
"""The reasons why arithmetic is float32 without tensor cores; the first row of the dtype up to the capability counts."""


def why_float32(dtype: str, capability: Capability) -> str:
    """Return why kernels compute in float32 on tensors of a half `dtype`, on a GPU whose tensor cores do not take it."""
    return next(text for known, since, text in SLOW_HALVES if known == dtype and since <= capability)


def generation_of(capability: Capability) -> Generation:
    """Return the newest known generation not newer than `capability`. Raises ValueError below the oldest one."""
    known = [generation for generation in GENERATIONS if generation.capability <= capability]
    if not known:
        oldest = GENERATIONS[0]
        raise ValueError("capability {}.{} is below {}.{}, the oldest known".format(*capability, *oldest.capability))
    return known[-1]


def features_of(capability: Capability) -> frozenset[str]:
    """Return the features that a CUDA device of `capability` surely has; none are known below the oldest generation."""
    if capability < GENERATIONS[0].capability:
        return frozenset()
    generation = generation_of(capability)
    return generation.features - (frozenset() if generation.capability[0] == capability[0] else _OF_ONE_MAJOR)


def parse_capability(text: str) -> Capability:
    """Parse the compute capability in "sm_61", "6.1" or a known name, "gtx1080". Raises ValueError for any other text."""
    if not isinstance(text, str):
        raise TypeError(f"device {shown(text)} is a {type(text).__name__}; write it as a text, sm_61 or 6.1")
    written = re.sub(r"[\s_-]", "", text.lower())
    if match := re.fullmatch(r"(?:sm)?(\d{1,2})\.?(\d)", written):
        return int(match[1]), int(match[2])
    for generation in GENERATIONS:
        if written in generation.example.lower().removeprefix("tesla").replace(" ", "").split(","):
            return generation.capability
    known = ", ".join(f"sm_{g.capability[0]}{g.capability[1]}" for g in GENERATIONS)
    way = f"write it as sm_61, 6.1 or gtx1080 (known: {known}), gfx942 or cpu"
    raise ValueError(f"device {shown(text)} is not a compute capability; {way}")


@lru_cache(maxsize=64)
def probe(kind: str, index: int = 0) -> Device:
    """Look up the facts of a device of this machine. `kind` is torch's device type. Needs torch for anything but "cpu"."""
    if kind == "cpu":
        name, features = _cpu_facts()
        memory: int | None
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            memory = None
        return Device("cpu", name, features=features, memory=memory, torch_code=True)
    if kind == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:  # its `major` and `minor` are no CUDA compute capability
            architecture = properties.gcnArchName.partition(":")[0]
            code = architecture in torch.cuda.get_arch_list()
            memory = properties.total_memory
            return Device("cuda", properties.name, memory=memory, index=index, torch_code=code, architecture=architecture)
        capability = (properties.major, properties.minor)
        code = torch_has_code(capability, torch.cuda.get_arch_list())
        return Device("cuda", properties.name, capability, features_of(capability), properties.total_memory, index, code)
    return Device(kind, kind, index=index)


def device_named(name: str | None = None) -> Device:
    """Look up the device that torch calls `name`, such as "cpu" or "cuda:1"; by default the first GPU, else the CPU.

    >>> device_named("cpu").type
    'cpu'
    """
    kind, _, index = (name or ("cuda" if cuda_count() else "cpu")).partition(":")
    return probe(kind, int(index or 0))


def cuda_count() -> int:
    """Count the CUDA devices that torch sees; 0 with a torch without CUDA."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@lru_cache(maxsize=1)
def cuda_driver() -> int:
    """Return the newest CUDA that this machine's driver knows, such as 13000 for 13.0. Raises RuntimeError without a driver."""
    version = ctypes.c_int()
    _ask_driver("cuDriverGetVersion", ctypes.byref(version))
    return version.value


def cuda_stream_number(stream: int) -> int:
    """Return the number of the CUDA stream with this handle, which no other stream of the process ever has, as handles may.

    Handles of streams that each device or thread has are those of the current device and thread. Raises RuntimeError without a
    driver of CUDA 12.0 or newer.
    """
    number = ctypes.c_ulonglong()
    _ask_driver("cuStreamGetId", ctypes.c_void_p(stream), ctypes.byref(number))
    return number.value


def _ask_driver(function: str, *arguments: object) -> None:
    try:
        code = getattr(_driver(), function)(*arguments)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"CUDA's driver, of 12.0 or newer, cannot be loaded: {error}") from None
    if code:
        raise RuntimeError(f"CUDA's driver does not answer: {function} gives error {code}")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def capturing(device: torch.device) -> bool:
    """True if the current stream of `device`, which need not be the current device, is being captured into a CUDA graph."""
    import torch

    if device.type != "cuda":
        return False
    with current(device):
        return torch.cuda.is_current_stream_capturing()


def current(device: torch.device) -> AbstractContextManager[None]:
    """Make a CUDA `device` current within the block, ten times as fast as torch does if it already is."""
    import torch

    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Return the handle of torch's current stream on a CUDA `device`, without the object that torch would make of it."""
    import torch

    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    handle: int = torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device.index)
    return handle


def has_torch_code(device: Device) -> bool | None:
    """True if the installed torch has code for `device`, assumed or not; None when that is not known."""
    if device.torch_code is not None or device.capability is None:
        return device.torch_code
    import torch

    flags: str | None = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # `get_arch_list` answers only where a GPU is
    return torch_has_code(device.capability, flags.split() if flags else [])


def torch_has_code(capability: Capability, architectures: list[str]) -> bool:
    """True if a torch built for `architectures` (such as ["sm_60", "sm_90a", "compute_90"]) runs on `capability`.

    A cubin ("sm_") runs on the same major and an equal or higher minor version, PTX ("compute_") on anything not older.
    Both kinds run on exactly their own capability when they end in "a", and on the same major only when they end in "f".
    """
    for match in filter(None, (re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name) for name in architectures)):
        built = int(match[2]), int(match[3])
        any_major = match[1] == "compute" and not match[4]
        if built == capability or (match[4] != "a" and built <= capability and (any_major or built[0] == capability[0])):
            return True
    return False


_FLAGS = {"avx2": "avx2", "fma": "fma", "f16c": "f16c", "avx512f": "avx512", "avx512_bf16": "avx512_bf16", "asimd": "neon"}


def _cpu_facts() -> tuple[str, frozenset[str]]:
    """Return the CPU's name, with family and model where a hypervisor hides the model, and its features."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    name = facts.get("model name") or platform.processor() or platform.machine() or "cpu"
    if "cpu family" in facts and not re.search(r"\d", name):
        name += f" (family {facts['cpu family']}, model {facts.get('model')})"
    flags = {*facts.get("flags", "").split(), *facts.get("Features", "").split()}
    features = {feature for flag, feature in _FLAGS.items() if flag in flags}
    if platform.machine().lower() in ("arm64", "aarch64"):
        features.add("neon")
    return name, frozenset(features)
