"""A pattern written on the command line: JSON, a file with JSON, or the call that makes it. Imports no torch."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dilkit.files import read_bytes, why_not
from dilkit.pattern import KINDS, Pattern, broken_kinds
from dilkit.pattern.presets import Presets
from dilkit.tools.console.text import nearest

PRESETS = tuple(name for name, value in vars(Presets).items() if isinstance(value, classmethod) and name != "of")
"""The names of `Pattern.mistral` and the others."""


def written_pattern(text: str) -> Pattern:
    """An argument type: the pattern of this JSON or this call, or of a file that holds JSON.

    >>> written_pattern("longformer(512, 16)") == Pattern.longformer(512, 16)
    True
    >>> print(written_pattern("SlidingWindow(512), GlobalTokens(4)"))
    Pattern.of(SlidingWindow(512), GlobalTokens(4))
    """
    try:
        if text.rstrip().endswith(")") and not Path(text).exists():
            return _called(text)
        return Pattern.from_json(text if text.lstrip().startswith("{") else read_bytes(Path(text)).decode())
    except OSError as error:
        why = f"is no JSON object and no call, such as longformer(512, 16), and as a file it {why_not(error)}"
        raise argparse.ArgumentTypeError(f"{text!r} {why}") from None
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _called(text: str) -> Pattern:
    """The pattern of `Pattern(...)`, `Pattern.of(...)`, a preset, or branches with commas between them. Raises ValueError for
    any other text: nothing but these calls is performed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no call of Python: {error.msg}") from None
    nodes = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    made = [_value(node) for node in nodes]
    (first,) = made if len(made) == 1 else (None,)
    return first if isinstance(first, Pattern) else Pattern.of(*made)


def _value(node: ast.expr) -> Any:
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise ValueError(f"{ast.unparse(node)!r} is no number, no text and no list of these") from None
    if any(named.arg is None for named in node.keywords):
        raise ValueError(f"{ast.unparse(node)}: ** is not known; write the arguments one by one")
    return _callee(node.func)(*map(_value, node.args), **{str(named.arg): _value(named.value) for named in node.keywords})


def _callee(node: ast.expr) -> Callable[..., Any]:
    name = ast.unparse(node)
    if (method := name.removeprefix("Pattern.")) in (*PRESETS, "of", "dense"):
        return getattr(Pattern, method)  # type: ignore[no-any-return]
    made_by = _makers()
    broken = () if name in made_by else broken_kinds().values()  # which loads the kinds that packages announce
    if name in (made_by := _makers()):
        return made_by[name]
    known = *PRESETS, "dense", *(cls.__name__ for cls in KINDS.values())
    why = "".join(f"; {reason}" for reason in broken)
    raise ValueError(f"{name!r} makes no pattern; known are {', '.join(known)}{nearest(name, known)}{why}")


def _makers() -> dict[str, Callable[..., Any]]:
    """Return loaded makers of patterns by name, dilkit's own before others."""
    return {cls.__name__: cls for cls in reversed(KINDS.values())} | {"Pattern": Pattern, "range": range}
