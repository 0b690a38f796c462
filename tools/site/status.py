"""What README.md and docs/ say of the state of dilkit: where its figures were measured, GPUs, experiments, versions."""

from __future__ import annotations

from pathlib import Path

from dilkit.selection.preference_table import ON_GPUS
from dilkit.tools.report import registry
from dilkit.tools.results.record import Environment
from dilkit.tools.site.figures import NOTHING

SYSTEMS = (
    "dilkit is developed and tested on Linux on x86-64. For aarch64 the C kernel ran under an emulator; on macOS and Windows "
    "nothing was run."
)
EXPERIMENTAL = (
    "**Experimental**, as it has not run on what it is made for: every backend on GPUs, but for what an H200 has run; "
    "NCCL and CUDA-aware MPI; ranks on more than one machine; the release workflow. Everything else is held to the "
    "double-precision oracle on CPUs by `make test`."
)
VERSIONS = (
    "**Versions.** Before 1.0 a minor version may change what is public, and the changelog says how. What will be removed warns "
    "for one minor version first. A patch version only fixes faults."
)


def status(root: Path) -> str:
    """The whole of it, a paragraph each."""
    first, *others = ON_GPUS
    return "\n\n".join((f"**CPUs.** {measured_on(root)} {SYSTEMS}", f"**GPUs.** {first}", *others, EXPERIMENTAL, VERSIONS))


def on_gpus(root: Path) -> str:
    """What `dilkit info` says of GPUs, a paragraph each."""
    return "\n\n".join(ON_GPUS)


def executed(root: Path) -> str:
    """What has been executed of the kernels for GPUs, without one."""
    path = root / "docs" / "results" / "ptx.json"
    sentence = registry.sentence_of(path) if path.exists() else NOTHING
    link = "[What has been executed](docs/gpu-kernels.md#what-has-been-executed)"
    return f"{sentence} {link} leaves out machine code, and `triton` in half precision from 9.0 on."


def measured_on(root: Path) -> str:
    """The CPUs that the results in docs/results are of, each once."""
    results = [registry.read(path) for path in sorted((root / "docs" / "results").glob("*.json"))]
    machines = sorted({_machine(result.environment) for result in results if result.environment.device == "cpu"})
    return f"The figures of these pages were measured on {len(machines)} CPUs: {'; '.join(machines)}."


def _machine(where: Environment) -> str:
    """A CPU with its cores and its widest vector instructions."""
    widest = max((name for name in where.features if name.startswith("avx")), default="no AVX")
    return f"{where.device_name} ({where.cores} cores, {widest})"
