"""`dilkit order`."""

import pytest
from helpers.command_line import json_output, output

from dilkit import locality_report, order
from dilkit.orders.comparison import curve_orders
from dilkit.tools.results.decode import encode

SMALL = ("order", "--shape", "16x16", "--segments", "64")


def test_curves_are_side_by_side(capsys):
    lines = output(capsys, *SMALL, "--rates", "2,4").splitlines()
    assert lines[0] == "16x16 cells: 256 tokens; > marks hilbert"
    assert lines[2] == "segments of 64 tokens: 4"
    found = {curve: locality_report(one, 64, (2, 4)) for curve, one in curve_orders((16, 16), 64).items()}
    assert [line[4:15].strip() for line in lines[4:9]] == ["row-major", "snake", "tile 8x8", "morton", "hilbert"]
    assert "".join(line[2] for line in lines[4:9]) == "    >"
    for line, one in zip(lines[4:9], found.values(), strict=True):
        assert line.split()[-5:] == [
            f"{one.aligned.diameter:.1f}",
            f"{one.shifted.near_48:.3f}",
            f"{one.shifted.diameter:.1f}",
            *(f"{kept.mean:.2f}" for kept in one.kept),
        ]
    report = json_output(capsys, *SMALL, "--segments", "64,50", "--rates", "2,8", "--window", "5x3")
    expected = locality_report(order((16, 16), "hilbert"), 50, (2, 8), window=(5, 3), block=128)
    assert report["segments"][1]["curves"]["hilbert"] == encode(expected)


@pytest.mark.parametrize(
    "options",
    [
        "--shape 1000x1 --segments 7 --rates 1,2,3,4,5,6,7,8,9",
        "--shape 8x16x16 --segments 512 --window 3 --curve tile",
        "--shape 12x20 --curve snake --window 3x5 --segments 60,100000 --rates 100",
    ],
)
def test_the_report_fits_in_100_columns_and_a_picture_is_drawn(capsys, tmp_path, options):
    pytest.importorskip("matplotlib")
    *lines, last = output(capsys, "order", *options.split(), "--png", str(tmp_path / "order.png")).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("  > ") for line in lines) >= 1
    assert last == f"wrote {tmp_path / 'order.png'}"
    assert (tmp_path / "order.png").read_bytes().startswith(b"\x89PNG")
