"""The CUDA backend with its kernels on the CPU."""

from dataclasses import replace

from helpers.calls import starts_of
from helpers.fakes import registered
from helpers.host_launcher import HostLauncher
from torch import Tensor

from dilkit.backends.cuda.backend import CupyRaw
from dilkit.device import Capability
from dilkit.inputs import Inputs
from dilkit.op.scores import lowered
from dilkit.testing.conformance import CaseResult, check
from dilkit.testing.problems import Case
from dilkit.testing.tensors import make_tensors

FP32: Capability = (5, 2)
TENSOR_CORES: Capability = (8, 0)


class OnHost(CupyRaw):
    """The backend on the CPU, which acts as a device of `capability`."""

    requires = ("torch",)
    limits = replace(CupyRaw.limits, devices=frozenset({"cpu"}), min_capability=None)
    priority = -100

    def __init__(self, capability: Capability, launcher: HostLauncher | None = None, tile_rows: int | None = None):
        super().__init__(launcher or HostLauncher(order="random", workers=1), capability, tile_rows)
        self.name = "cupy_raw on sm_{}{}".format(*capability)


class Compiled(HostLauncher):
    """A launcher with other macros: fp32 gradients as for `arch`; `VECTOR` for all but `row_dots`."""

    def __init__(self, *options, arch: int = 0, vector: int | None = None, **more):
        super().__init__(*options, **more)
        self.arch, self.vector = arch, vector

    def launch(self, kernel, *given, **more):
        macros = dict(kernel.defines)
        if self.vector is not None and kernel.name != "row_dots":
            macros["VECTOR"] = self.vector
        if self.arch and kernel.name in ("fp32_dquery", "fp32_dkeyvalue"):
            macros["__CUDA_ARCH__"] = self.arch
        super().launch(replace(kernel, defines=tuple(macros.items())), *given, **more)


def judged(case: Case, *backend) -> CaseResult:
    with registered(OnHost(*backend)) as name:
        return check(name, case)


def both_passes(case: Case, *backend) -> list[Tensor]:
    own, problem, tensors = OnHost(*backend), case.problem(), make_tensors(case)
    starts = starts_of(case.lengths) if case.lengths else None
    bias = None if tensors.bias is None else lowered(tensors.bias, tensors.query.dtype)._replace(form=problem.bias)
    inputs = Inputs(*tensors.qkv, key_padding_mask=tensors.mask, cu_seqlens=starts, bias=bias)
    out, lse = own.forward(inputs, problem)
    return [out, lse, *own.backward(tensors.dout, inputs, out, lse, problem)]
