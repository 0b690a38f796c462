"""How the kernels in numba.cuda divide their work."""

from __future__ import annotations

import pytest

from dilkit.backends.numba.arguments import Tiling
from dilkit.backends.numba.tilings import TABLE, tiling_for


@pytest.mark.parametrize("tiling", sorted({tiling for row in TABLE.values() for tiling in row}, key=str), ids=str)
def test_threads_share_tiles_evenly(tiling: Tiling) -> None:
    assert tiling.rows % tiling.down == tiling.columns % tiling.down == 0
    assert tiling.columns % tiling.across == tiling.columns % 4 == 0
    assert tiling.head_dim % (4 * tiling.across) == 0
    assert tiling.threads % tiling.columns == 0
    assert tiling.threads >= tiling.rows


def test_a_head_dim_takes_the_next_tiling() -> None:
    assert [tiling_for("forward", size).head_dim for size in (1, 16, 17, 96, 97, 128)] == [16, 16, 32, 96, 128, 128]
    with pytest.raises(ValueError, match="head_dim=129: kernels are made for at most 128"):
        tiling_for("dquery", 129)
