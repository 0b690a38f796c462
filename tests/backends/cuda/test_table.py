"""Which CUDA kernel serves what."""

from __future__ import annotations

import pytest

from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, TABLE, kernel_for, padded
from dilkit.backends.tiles.backend import ROLES


@pytest.mark.parametrize(
    ("dtype", "last_without", "first_with"),
    [("float32", (12, 0), None), ("float16", (7, 0), (7, 5)), ("bfloat16", (7, 5), (8, 0))],
)
def test_tensor_cores_serve_half_types_where_they_are(
    dtype: str, last_without: tuple[int, int], first_with: tuple[int, int] | None
) -> None:
    for role in ("forward", "dquery", "dkeyvalue"):
        for capability in ((5, 2), last_without):
            assert kernel_for(role, dtype, 64, capability).name.startswith("fp32")
        for capability in (first_with, (12, 0)) if first_with else ():
            assert kernel_for(role, dtype, 64, capability).name.startswith("mma")


def test_every_head_dim_and_role_has_a_kernel() -> None:
    for role in (*ROLES, "stored"):
        for head_dim in range(1, 129):
            for dtype, storage in STORAGE.items():
                macros = kernel_for(role, dtype, head_dim, (8, 0)).macros
                assert (macros["HEAD_DIM"], macros["STORAGE"]) == (padded(head_dim), storage)
    assert {padded(d) for d in range(1, 129)} == set(HEAD_DIMS)
    assert {entry.role for entry in TABLE} == {*ROLES, "stored"}
    with pytest.raises(ValueError, match="head_dim=129"):
        padded(129)
    with pytest.raises(ValueError, match=r"capability 5\.0"):
        kernel_for("forward", "float32", 64, (5, 0))
