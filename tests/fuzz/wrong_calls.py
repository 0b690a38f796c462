"""Arguments that do not fit, by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilkit import Pattern

Change = Callable[[Any], Any]


def _grown(at: int, by: int = 1) -> Change:
    def change(x):
        which = min(at, x.dim() - 1)
        return torch.zeros([size + by * (i == which) for i, size in enumerate(x.shape)], dtype=x.dtype)

    return change


def _emptied(at: int) -> Change:
    return lambda x: x.narrow(at, 0, 0)


def shrunk(x: Tensor) -> Tensor:
    x = x.detach().clone()
    x.untyped_storage().resize_(max(0, x.untyped_storage().nbytes() - 1))
    return x


def _gone(x: Tensor) -> Tensor:
    x = x.detach().clone()
    x.untyped_storage().resize_(0)
    return x


ANYTHING: dict[str, Change] = {
    "text": lambda x: "text",
    "number": lambda x: 7,
    "fraction": lambda x: 0.5,
    "list": lambda x: [1, 2],
    "object": lambda x: object(),
    "dict": lambda x: {},
}
TENSOR: dict[str, Change] = ANYTHING | {
    "None": lambda x: None,
    "array": lambda x: np.zeros(tuple(x.shape), np.float32),
    "fewer dimensions": lambda x: x[0],
    "more dimensions": lambda x: x[None],
    "no dimensions": lambda x: x.new_zeros(()),
    "integers": lambda x: x.long(),
    "bools": lambda x: x.bool(),
    "complex": lambda x: x.to(torch.complex64),
    "fp8": lambda x: x.to(torch.float8_e4m3fn),
    "quantized": lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.detach().to_sparse(),
    "compressed": lambda x: x.detach().flatten(1).to_sparse_csr(),
    "memory gone": _gone,
    "memory short": shrunk,
}
BESIDE_OTHERS_OF_ANY_WIDTH: dict[str, Change] = {
    "more sequences": _grown(0),
    "more tokens": _grown(1),
    "other dtype": lambda x: x.to(torch.float16 if x.dtype != torch.float16 else torch.float32),
}
BESIDE_OTHERS = BESIDE_OTHERS_OF_ANY_WIDTH | {"wider rows": _grown(3)}
MASK: dict[str, Change] = ANYTHING | {
    "array": lambda x: np.zeros((2, 2), bool),
    "floats": lambda x: torch.zeros(x.shape[:2]),
    "bytes": lambda x: torch.zeros(x.shape[:2], dtype=torch.uint8),
    "longer": lambda x: torch.zeros(x.shape[0], x.shape[1] + 1, dtype=torch.bool),
    "of heads": lambda x: torch.zeros(x.shape[0], 1, x.shape[1], dtype=torch.bool),
    "one sequence": lambda x: torch.zeros(x.shape[1], dtype=torch.bool),
    "meta": lambda x: torch.zeros(x.shape[:2], dtype=torch.bool, device="meta"),
    "memory gone": lambda x: _gone(torch.zeros(x.shape[:2], dtype=torch.bool)),
    "memory short": lambda x: shrunk(torch.zeros(x.shape[:2], dtype=torch.bool)),
}
NO_BOOL: dict[str, Change] = ANYTHING | {"one": lambda x: 1, "None": lambda x: None, "tensor": lambda x: torch.tensor(True)}
NO_SCALE: dict[str, Change] = {name: change for name, change in ANYTHING.items() if name not in ("number", "fraction")} | {
    "NaN": lambda x: float("nan"),
    "infinite": lambda x: float("-inf"),
    "endless": lambda x: 10**400,
    "huge": lambda x: 1e301,
    "bool": lambda x: True,
    "tensor": lambda x: torch.tensor(0.5),
    "complex": lambda x: 1j,
}
NO_BACKEND: dict[str, Change] = ANYTHING | {
    "empty text": lambda x: "",
    "empty list": lambda x: [],
    "None in a list": lambda x: ["native", None],
    "comma": lambda x: "native,sdpa",
    "escape": lambda x: "\x1b[2J",
}

ARGUMENTS: dict[str, dict[str, Change]] = {
    "query": TENSOR | {"no heads": _emptied(2), "no row": _emptied(3)},
    "key": TENSOR | BESIDE_OTHERS | {"no heads": _emptied(2), "no row": _emptied(3), "more heads": _grown(2, 97)},
    "value": TENSOR | BESIDE_OTHERS_OF_ANY_WIDTH | {"no heads": _emptied(2), "more heads": _grown(2)},
    "pattern": ANYTHING | {"None": lambda x: None, "too many heads": lambda x: Pattern([4], [1], heads=[(0, 10**6)])},
    "key_padding_mask": MASK,
    "is_causal": NO_BOOL,
    "return_lse": NO_BOOL,
    "scale": NO_SCALE,
    "backend": NO_BACKEND,
}

OF_PATTERN = ("segment_lengths", "dilation_rates", "offset", "overlap", "heads", "head_shard")
"""The fields of a pattern: an error may name one of them where it means the pattern."""


def names_of(argument: str) -> tuple[str, ...]:
    """Return the names that an error may have: key and value are compared with each other, and with query."""
    others = {"pattern": ("pattern", "heads"), "value": ("value", "key"), "query": ("query", "key")}
    return others.get(argument, (argument,))
