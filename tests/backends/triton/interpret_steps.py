"""Runs steps over stored rows on the kernel in Triton, in Triton's interpreter, against fp64 and the definition.

    python tests/backends/triton/interpret_steps.py [--share I/N] [--all] [--only TEXT]

By default the steps of the other kernels for GPUs, every two options together, and a few tables that lead astray. Exit code 1
if one fails. The kernel must read and write only tensors of the step.
"""

import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from helpers.emulated import parser_of_shares  # noqa: E402
from helpers.fakes import registered  # noqa: E402
from helpers.step_checks import Check, checks  # noqa: E402
from helpers.steps import StepCase, make_step  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from dilkit.backends.triton.backend import TritonTiles  # noqa: E402
from dilkit.backends.triton.launch import kernel  # noqa: E402
from dilkit.backends.triton.sizes import Sizes  # noqa: E402
from dilkit.problem import Problem  # noqa: E402
from dilkit.selection.proving import StepProof  # noqa: E402


class Memory:
    """The tensors of a launch, beyond which the interpreter touches nothing."""

    def __init__(self):
        self.first, self.end = (np.zeros(1, np.uint64) for _ in range(2))
        self.load, self.store = (
            interpreter.InterpreterBuilder.create_masked_load,
            interpreter.InterpreterBuilder.create_masked_store,
        )

    def know(self, given: dict[str, Any], element: int):
        """Note the memory of a launch and of its tables; `element`: bytes of a stored number."""
        ranges = [_range(x) for x in _tensors(given.values())]
        sizes = [element] * given["stored"] + [8] * given["positions"] + [1] * given["unseen"]
        ranges += [(at, at + reach * size) for (at, reach, *_), size in zip(given["memory"].tolist(), sizes, strict=True)]
        self.first, self.end = np.array(sorted(ranges), np.uint64).T

    def expect(self, pointers, mask):
        """Raise IndexError for an address that is nobody's."""
        where = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.uint64)
        at = np.searchsorted(self.first, where, side="right") - 1
        beyond = (at < 0) | (where + np.uint64(pointers.get_element_ty().primitive_bitwidth // 8) > self.end[at])
        if beyond.any():
            raise IndexError(f"{np.count_nonzero(beyond)} of {beyond.size} addresses are beyond the tensors of the step")


MEMORY = Memory()


def _load(builder, pointers, mask, *others, **named):
    MEMORY.expect(pointers, mask)
    return MEMORY.load(builder, pointers, mask, *others, **named)


def _store(builder, pointers, value, mask, *others):
    MEMORY.expect(pointers, mask)
    return MEMORY.store(builder, pointers, value, mask, *others)


def _round(builder, source, wanted):
    """Numbers of fp32 as bf16, rounded as on GPUs; the interpreter cuts them off."""
    if (source.dtype.scalar, wanted.scalar) != (tl.float32, tl.bfloat16):
        return _truncate(builder, source, wanted)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
    return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)


_truncate = interpreter.InterpreterBuilder.create_fp_trunc
interpreter.InterpreterBuilder.create_fp_trunc = _round
interpreter.InterpreterBuilder.create_masked_load = _load
interpreter.InterpreterBuilder.create_masked_store = _store


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors(x)


def _range(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class InterpretingLauncher:
    """A launcher on which several programs share a row. `factor` multiplies the scale."""

    def __init__(self, factor: float):
        self.numbers, self.factor = torch.zeros(2, dtype=torch.int32), factor

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        return Sizes(16, 64, 4, 1)

    def resident(self, sizes: Sizes, device: torch.device) -> int:
        return 24

    def counter(self, device: torch.device) -> int:
        return self.numbers.data_ptr()

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]):
        given = dict(zip(kernel(role).arg_names, arguments, strict=False), numbers=self.numbers)
        MEMORY.know(given, constants["STORED"].primitive_bitwidth // 8)
        *others, scale2 = arguments
        kernel(role)[(programs,)](*others, scale2 * self.factor, **constants)
        assert not self.numbers.any(), f"the counter is left at {self.numbers.tolist()}"


class Interpreted(TritonTiles):
    name = "triton_interpreted"
    limits = replace(TritonTiles.limits, devices=frozenset({"cpu"}), min_capability=None)

    def __init__(self, factor: float = 1.0):
        super().__init__(InterpretingLauncher(factor))


def has_the_same_bits_again(own: Interpreted):
    case = StepCase(most=600, spans=3, batch=1)
    results = [own.attend_stored(make_step(case), case.problem) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def is_proven(own: Interpreted):
    """With each pattern and kind of cache: a kernel that is right; one whose scale is wrong is not."""
    asked = dict(device="cpu", dtype="float32", stored="float32", head_dim=16, group=2, softcap=False, bias=None)
    for backend, wrong in ((own, 0), (Interpreted(factor=0.8), 6)):
        with registered(backend):
            complaints = list(StepProof(backend.name, **asked).complaints())
        assert len(complaints) == wrong, complaints


OWN = (has_the_same_bits_again, is_proven)


def main() -> int:
    parser = parser_of_shares(__doc__, "long")
    parser.add_argument("--only", default="", help="checks whose name has this text")
    args = parser.parse_args()
    number, shares = map(int, args.share.split("/"))
    every = [*((name, check) for name, check, usual in checks() if usual or args.all), *((x.__name__, x) for x in OWN)]
    chosen = [one for one in every if args.only in one[0]][number - 1 :: shares]
    failed = [name for name, check in chosen if not passes(name, check)]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} checks passed {' | '.join(failed)}")
    return bool(failed or not chosen)


def passes(name: str, check: Check) -> bool:
    start, reason = time.process_time(), ""
    is_astray = name.startswith("astray")  # whose products are larger than numbers are
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=not is_astray)
    try:
        check(Interpreted())
    except Exception as error:  # whatever a kernel that is broken does, the others are checked
        reason = f"{type(error).__name__}: {error}"
    print(f"{'failed' if reason else 'passed'} {name} ({time.process_time() - start:.1f} s) {reason[-1500:]}", flush=True)
    return not reason


if __name__ == "__main__":
    sys.exit(main())
