"""Every name of torch that the code uses is in the installed torch."""

import ast

import pytest
import torch
import torch.distributed
import torch.nn.attention
from helpers.project import ROOT

FILES = sorted(path for folder in ("dilkit", "backends", "comm", "tools") for path in (ROOT / folder).rglob("*.py"))


def names(tree):
    """The longest dotted names that begin with `torch`, but for operators, which torch makes at their first use."""
    inner = set()
    for node in ast.walk(tree):  # outer nodes come before those within
        if isinstance(node, ast.Attribute) and node not in inner:
            parts, below = [node.attr], node.value
            while isinstance(below, ast.Attribute):
                inner.add(below)
                parts.append(below.attr)
                below = below.value
            if isinstance(below, ast.Name) and below.id == "torch" and parts[-1] != "ops":
                yield ".".join(["torch", *reversed(parts)])


def found(name):
    thing = torch
    for part in name.split(".")[1:]:
        if not hasattr(thing, part):
            return False
        thing = getattr(thing, part)
    return True


@pytest.mark.parametrize("folder", ["dilkit", "backends", "comm", "tools"])
def test_torch_has_every_name(folder):
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == folder
        for name in sorted(set(names(ast.parse(path.read_text()))))
        if not found(name)
    ]
    assert not gone
