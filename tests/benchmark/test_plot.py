"""The picture of a measurement."""

import sys

import pytest

from octavo.benchmark.measure import Measurement, Run
from octavo.benchmark.plot import check_plot, draw
from octavo.benchmark.workloads import Workload
from octavo.errors import ConfigError, MissingExtraError


def measurement(name, first, token):
    work = Workload(name, ([1, 2],), 2)
    return Measurement(work, (Run(1.0, [first], token, 0, 0, 0, 2), Run(2.0, [2 * first], token, 0, 0, 0, 2)))


def test_a_picture_is_drawn(tmp_path):
    path = tmp_path / "figures.png"
    check_plot(path)
    # Times far apart, close together, and none at all.
    draw([measurement("single", 0.1, [0.05]), measurement("batch", 30.0, [0.06])], "all", path)
    draw([measurement("single", 0.1, [])], "one", tmp_path / "one.svg")
    assert path.read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "one.svg").read_text()
    assert "<svg" in drawn


def test_nothing_measured_is_an_empty_picture(tmp_path):
    draw([], "nothing", tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_a_missing_folder_is_said_before_anything_is_measured(tmp_path):
    path = tmp_path / "nowhere" / "figures.png"
    with pytest.raises(ConfigError) as caught:
        check_plot(path)
    assert str(caught.value) == (
        f"The picture {str(path)!r} cannot be written: there is no folder {str(path.parent)!r}."
    )


@pytest.mark.parametrize("name", ["figures", "figures.xls"])
def test_a_kind_of_file_that_cannot_be_drawn_is_said_with_those_that_can(tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        check_plot(tmp_path / name)
    assert str(caught.value) == (
        f"The picture {str(tmp_path / name)!r} cannot be written: its name must end in .png or .svg or .pdf."
    )


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError) as caught:
        check_plot(tmp_path / "figures.png")
    assert str(caught.value) == "--plot needs matplotlib; install it with: pip install 'octavo[plot]'"
