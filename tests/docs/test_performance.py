"""What the benchmarks measured is published as it was; a figure that got worse, or misses its bar, fails the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.reports import performance, performance_chart

SPEC = """
[gate]
margin = 0.1

[measures.speed]
measure = "Doing it"
rival = "eager"
bar = 1.0
better = "higher"
unit = "x as fast"
how = "In turns"

[measures.traffic]
measure = "Traffic of it"
rival = "none: a count"
bar = 512
better = "lower"
unit = "bytes"
margin = 0.02
how = "Counted"

[misses]
"""
PAGE = "# Performance\n\nBefore.\n\n<!-- generated: begin -->\nold\n<!-- generated: end -->\n\n## After\n\nKept.\n"
Publish = Callable[..., tuple[int, str]]


@pytest.fixture
def publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Publish:
    """Publishes figures as `nox -s bench` does, and returns the exit status and what was said."""
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(PAGE)

    def run(*arguments: str, spec: str = SPEC, told: Mapping[str, Mapping[str, Any]] | None = None,
            **figures: float) -> tuple[int, str]:
        (tmp_path / "performance.toml").write_text(spec)
        described = performance.load_spec(tmp_path / "performance.toml").measures
        benchmarks = [{"name": f"test_{name}[case]", "extra_info": {
            "measure": described[name].measure, "bar": described[name].bar, "better": described[name].better,
            "ratio": ratio, "details": {"a part (ms)": 12.5}, **(told or {}).get(name, {})}}
            for name, ratio in figures.items()]
        benchmarks.append({"name": "test_something_else", "extra_info": {}})
        measured = tmp_path / "measured.json"
        measured.write_text(json.dumps({"benchmarks": benchmarks}))
        status = performance.main([str(measured), "--docs", str(page.parent), "--spec",
                                   str(tmp_path / "performance.toml"), *arguments])
        return status, capsys.readouterr().out

    return run


def published(folder: Path) -> performance.Results:
    (path,) = (folder / "docs" / "results").glob("*.json")
    return performance.load(path)


def test_a_run_is_published_with_its_page_and_picture(publish: Publish, tmp_path: Path) -> None:
    status, _ = publish(speed=1.25, traffic=400)
    assert status == 0
    results = published(tmp_path)
    assert {name: figure.ratio for name, figure in results.figures.items()} == {"speed": 1.25, "traffic": 400}
    assert re.fullmatch(r"performance-torch-\d+\.\d+\.\d+-cpu", results.name)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", results.date)
    page = (tmp_path / "docs" / "performance.md").read_text()
    assert page.startswith("# Performance\n\nBefore.\n\n<!-- generated: begin -->\n## PyTorch ")
    assert page.endswith("<!-- generated: end -->\n\n## After\n\nKept.\n")
    assert "\nold\n" not in page
    assert "| Doing it | eager | ≥ 1 | 1.25 x as fast | yes |" in page
    assert "| Traffic of it | none: a count | ≤ 512 | 400 bytes | yes |" in page
    assert "a part (ms) 12.5" in page
    (picture,) = re.findall(r"!\[[^]]+\]\((.+?)\)", page)
    ElementTree.parse(tmp_path / "docs" / picture)


def test_a_page_is_written_again_without_growing(publish: Publish, tmp_path: Path) -> None:
    publish(speed=1.25, traffic=400)
    first = (tmp_path / "docs" / "performance.md").read_text()
    publish(speed=1.25, traffic=400)
    assert (tmp_path / "docs" / "performance.md").read_text() == first


@pytest.mark.parametrize(("second", "said"), [
    ({"speed": 1.19, "traffic": 400}, ""),
    ({"speed": 1.13, "traffic": 400}, r"speed: 1\.13 x as fast is worse than 1\.3, published before, by more than 10%"),
    ({"speed": 2.0, "traffic": 409}, r"traffic: 409 bytes is worse than 400, published before, by more than 2%"),
])
def test_a_figure_may_get_worse_within_its_margin_only(
    publish: Publish, second: dict[str, float], said: str
) -> None:
    assert publish(speed=1.3, traffic=400)[0] == 0
    status, output = publish(**second)
    assert status == (1 if said else 0)
    assert re.search(said, output)


def test_what_got_worse_is_written_and_fails_until_it_is_accepted(publish: Publish, tmp_path: Path) -> None:
    publish(speed=2.0, traffic=400)
    assert publish(speed=1.5, traffic=400)[0] == 1
    assert published(tmp_path).figures["speed"].ratio == 1.5
    assert publish(speed=1.5, traffic=400)[0] == 1
    assert publish("--accept", speed=1.5, traffic=400)[0] == 0
    assert publish(speed=1.5, traffic=400)[0] == 0


def test_a_bar_is_missed_with_a_reason_or_not_at_all(publish: Publish, tmp_path: Path) -> None:
    status, output = publish(speed=0.9, traffic=400)
    assert status == 1
    assert re.search(r"speed: 0\.9 x as fast misses its bar of 1", output)
    assert "| 0.9 x as fast | **no** |" in (tmp_path / "docs" / "performance.md").read_text()
    listed = f'{SPEC}speed = "PyTorch sets\n a floor."\n'.replace("\n a", " a")
    assert publish(speed=0.9, traffic=400, spec=listed)[0] == 0
    assert "- `speed`: PyTorch sets a floor." in (tmp_path / "docs" / "performance.md").read_text()
    assert publish(speed=1.05, traffic=400, spec=listed)[0] == 0
    status, output = publish(speed=1.2, traffic=400, spec=listed)
    assert status == 1
    assert "take it off the misses" in output


def test_a_whole_run_measures_everything_and_a_partial_one_publishes_nothing(publish: Publish, tmp_path: Path) -> None:
    status, output = publish(speed=1.3)
    assert (status, "traffic: not measured" in output) == (1, True)
    publish(speed=1.3, traffic=400)
    before = published(tmp_path)
    assert publish("--partial", speed=1.25)[0] == 0
    assert publish("--partial", speed=1.1)[0] == 1
    assert published(tmp_path) == before


@pytest.mark.parametrize(("told", "said"), [
    ({"bar": 0.5}, "says bar = 0.5, performance.toml says 1.0"),
    ({"better": "lower"}, "says better = 'lower'"),
    ({"measure": "Something"}, "says measure = 'Something'"),
])
def test_a_benchmark_says_what_the_table_says(publish: Publish, told: dict[str, Any], said: str) -> None:
    with pytest.raises(performance.SpecError, match=said):
        publish(speed=1.0, traffic=400, told={"speed": told})


@pytest.mark.parametrize(("benchmarks", "said"), [
    (["test_weather"], "no measure 'weather'"),
    (["test_speed[a]", "test_speed[b]"], "Two benchmarks publish 'speed'"),
])
def test_a_figure_belongs_to_one_measure(tmp_path: Path, benchmarks: list[str], said: str) -> None:
    (tmp_path / "performance.toml").write_text(SPEC)
    spec = performance.load_spec(tmp_path / "performance.toml")
    told = {"measure": "Doing it", "bar": 1.0, "better": "higher", "ratio": 1.0}
    with pytest.raises(performance.SpecError, match=said):
        performance.figures_of({"benchmarks": [{"name": name, "extra_info": told} for name in benchmarks]}, spec)


@pytest.mark.parametrize(("misses", "said"), [('weather = "rain"', "is no measure"), ('speed = " "', "no reason")])
def test_a_miss_is_one_of_a_measure_and_has_a_reason(tmp_path: Path, misses: str, said: str) -> None:
    (tmp_path / "performance.toml").write_text(SPEC + misses)
    with pytest.raises(performance.SpecError, match=said):
        performance.load_spec(tmp_path / "performance.toml")


def test_a_page_without_the_marks_is_refused(publish: Publish, tmp_path: Path) -> None:
    (tmp_path / "docs" / "performance.md").write_text("# Performance\n")
    with pytest.raises(performance.SpecError, match="has no part between"):
        publish(speed=1.25, traffic=400)


def test_bars_stand_on_the_side_where_they_belong() -> None:
    picture = ElementTree.fromstring(performance_chart.bars(
        [("a < b", 2.0), ("short", 0.5), ("nothing used", float("inf")), ("nothing reached", 0.0)]))
    space = "{http://www.w3.org/2000/svg}"
    middle = float(picture.findall(f"{space}line")[0].attrib["x1"])
    bars = [(float(bar.attrib["x"]), float(bar.attrib["x"]) + float(bar.attrib["width"]))
            for bar in picture.findall(f"{space}rect")[1:]]
    assert [left >= middle for left, _ in bars] == [True, False, True, False]
    assert all(right <= middle + 0.1 for (left, right) in bars if left < middle)
    assert all(0 < left < right < float(picture.attrib["width"]) for left, right in bars)


def names_measured() -> set[str]:
    """The measures that benchmarks of this repository publish."""
    sources = [path.read_text() for path in (performance.ROOT / "tests" / "benchmarks").glob("bench_*.py")]
    functions = [function for source in sources for function in re.split(r"(?m)^def ", source)]
    return {match[1] for function in functions if (match := re.match(r"test_(\w+)\(", function))
            and re.search(r"\bpublish\b|extra_info", function)}


def test_every_measure_of_the_table_has_its_benchmark_and_the_other_way_round() -> None:
    assert set(performance.load_spec().measures) == names_measured()


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    assert re.match(r"\d+ cores, ", performance.machine())
    assert platform.node() not in performance.machine()


def test_every_known_miss_is_explained_on_the_page() -> None:
    _, _, written = (performance.ROOT / "docs" / "performance.md").read_text().partition("<!-- generated: end -->")
    assert [name for name in performance.load_spec().misses if f"`{name}`" not in written] == []
