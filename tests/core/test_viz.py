"""Counts in characters and colours."""

import pytest

from dilkit import Pattern
from dilkit.viz import draw_count
from dilkit.viz.counts import coloured


def test_colours_show_two_rows_a_line():
    lines = coloured([[0, 1], [1, 0], [2, 2]])
    assert [line.count("\u2580") for line in lines] == [2, 2]
    assert all(line.endswith("\033[0m") for line in lines)
    assert lines[0].split("\u2580")[0] != lines[0].split("\u2580")[1]


@pytest.mark.parametrize("heads", [1, 5])
def test_a_title_of_several_lines_leaves_room_for_all_labels(heads):
    figures = pytest.importorskip("matplotlib.figure")
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    figure = figures.Figure(layout="constrained")
    agg.FigureCanvasAgg(figure)
    draw_count(figure, Pattern([4, 8], [1, 2]).count(8, heads), "a title of several lines " * 6)
    figure.canvas.draw()
    (width, height), box = figure.get_size_inches(), figure.get_tightbbox()
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height
