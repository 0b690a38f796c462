"""Checks of steps: right results, equal bits, errors that name the argument."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fuzz.calls import Call, complaints
from torch import Tensor

from dilkit.testing.tensors import Tensors

DOES_NOT_FIT = (ValueError, TypeError)
BY_TORCH = (RuntimeError, NotImplementedError)
"""Exceptions that torch itself raises for arguments that do not fit an operator's schema, or devices that have no memory."""


class Wrong(AssertionError):
    """A result that is not right, an error of the wrong kind, or none where one is due."""


def require(right: bool, text: str):
    if not right:
        raise Wrong(text)


def require_right(call: Call, tensors: Tensors, found):
    wrong = complaints(call, tensors, found)
    require(not wrong, "; ".join(wrong))


def require_same(first: dict[str, Tensor], second: dict[str, Tensor], when: str):
    bits = [{name: x.contiguous().view(torch.uint8) for name, x in results.items()} for results in (first, second)]
    other = [name for name, x in bits[0].items() if not torch.equal(x, bits[1][name])]
    require(not other, f"{', '.join(other)} differ {when}")


def require_raises(action: Callable[[], Any], errors: tuple[type[Exception], ...], *names: str):
    try:
        action()
    except errors as error:
        named = not names or any(name in str(error) for name in names)
        require(named, f"{type(error).__name__} does not name {' or '.join(names)}: {error}")
    except Exception as error:
        raise Wrong(f"{type(error).__name__} where {errors[0].__name__} is due: {error}") from error
    else:
        raise Wrong(f"nothing was raised: {errors[0].__name__} is due")


def attempt(action: Callable[[], Any], errors: tuple[type[Exception], ...] = DOES_NOT_FIT):
    try:
        return action()
    except errors:
        return None
    except Exception as error:
        raise Wrong(f"{type(error).__name__} where {errors[0].__name__} is due: {error}") from error


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: job(), jobs))
