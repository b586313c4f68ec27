"""Plots of labelled lines: labels do not cover each other, and the same plot is the same file."""

from headmix_vision.analysis.line_charts import apart, label_ends, line_figure, save_svg


def test_labels_stand_apart():
    assert apart([0.0, 40.0, 90.0], 13, 100) == [0.0, 40.0, 90.0]
    assert apart([10.0, 12.0], 13, 100) == [4.5, 17.5]
    assert apart([0.0, 20.0, 22.0, 24.0], 13, 100) == [-3.0, 10.0, 23.0, 36.0]  # the three push the first
    assert apart([0.0, 60.0, 98.0, 99.0], 13, 100) == [0.0, 60.0, 87.0, 100.0]
    assert apart([], 13, 100) == []


def test_a_plot_is_the_same_file_twice(tmp_path):
    for name in ("a.svg", "b.svg"):
        figure, ((left, right),) = line_figure(columns=2)
        left.plot([1, 2], [3, 4], label="rising")
        left.plot([1], [4], label="a point")
        right.plot([1, 2], [3, 4])
        label_ends(left)
        label_ends(right)
        save_svg(tmp_path / name, figure)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert ">rising</text>" in text and ">a point</text>" in text
