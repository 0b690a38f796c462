"""Which CUDA kernel serves what."""

from __future__ import annotations

import pytest

from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, TABLE, kernel_for, padded
from dilkit.backends.tiles.backend import ROLES


@pytest.mark.parametrize(
    ("dtype", "capability", "source"),
    [
        ("float32", (5, 2), "fp32"),
        ("float32", (9, 0), "fp32"),
        ("float16", (6, 1), "fp32"),
        ("float16", (7, 0), "fp32"),
        ("float16", (7, 5), "mma"),
        ("bfloat16", (7, 5), "fp32"),
        ("bfloat16", (8, 0), "mma"),
        ("bfloat16", (12, 0), "mma"),
    ],
)
def test_tensor_cores_serve_half_types_where_they_are(dtype: str, capability: tuple[int, int], source: str) -> None:
    for role in ("forward", "dquery", "dkeyvalue"):
        assert kernel_for(role, dtype, 64, capability).name.startswith(source)


def test_every_head_dim_and_role_has_a_kernel() -> None:
    for role in (*ROLES, "stored"):
        for head_dim in range(1, 129):
            for dtype, storage in STORAGE.items():
                kernel = kernel_for(role, dtype, head_dim, (8, 0))
                assert kernel.macros["HEAD_DIM"] == padded(head_dim)
                assert kernel.macros["STORAGE"] == storage
    assert {padded(d) for d in range(1, 129)} == set(HEAD_DIMS)
    assert {entry.role for entry in TABLE} == {*ROLES, "stored"}
    with pytest.raises(ValueError, match="head_dim=129"):
        padded(129)
    with pytest.raises(ValueError, match=r"capability 5\.0"):
        kernel_for("forward", "float32", 64, (5, 0))
