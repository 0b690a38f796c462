"""Patterns that are written as the calls that make them, such as "longformer(512, 16)", read without `eval`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from dilkit.pattern import KINDS, Pattern, broken_kinds
from dilkit.pattern.presets import Presets

PRESETS = tuple(name for name, value in vars(Presets).items() if isinstance(value, classmethod) and name != "of")
"""The names of `Pattern.mistral` and the others."""


def pattern_of_text(text: str) -> Pattern:
    """Return the pattern of JSON, or of `Pattern(...)`, `Pattern.of(...)`, a preset, or branches with commas between them.

    Raises ValueError for any other text: nothing but these calls is performed.
    """
    if text.lstrip().startswith("{"):
        return Pattern.from_json(text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no call of Python: {error.msg}") from None
    values = [_value(node) for node in (tree.elts if isinstance(tree, ast.Tuple) else [tree])]
    return values[0] if len(values) == 1 and isinstance(values[0], Pattern) else Pattern.of(*values)


def _value(node: ast.expr) -> Any:
    if not isinstance(node, ast.Call):
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise ValueError(f"{ast.unparse(node)!r} is no number, no text and no list of these") from None
    if any(named.arg is None for named in node.keywords):
        raise ValueError(f"{ast.unparse(node)}: ** is not known; write the arguments one by one")
    name = ast.unparse(node.func).removeprefix("Pattern.")
    broken = () if name in _makers() else broken_kinds().values()  # which loads the kinds that packages announce
    if name not in (makers := _makers()):
        near = (f"did you mean {meant}?" for meant in get_close_matches(name, makers, 1))
        why = "".join(f"; {reason}" for reason in (*near, *broken))
        raise ValueError(f"{name!r} makes no pattern; known are {', '.join(makers)}{why}")
    return makers[name](*map(_value, node.args), **{str(named.arg): _value(named.value) for named in node.keywords})


def _makers() -> dict[str, Callable[..., Any]]:
    presets = {name: getattr(Pattern, name) for name in (*PRESETS, "of", "dense", "head_split")}
    kinds = {cls.__name__: cls for cls in reversed(KINDS.values())}
    return presets | kinds | presets | {"Pattern": Pattern, "range": range}
