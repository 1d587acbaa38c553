"""The notebooks print what they are stored as having printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.pages import notebooks
from support.processes.warm import run_python

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    made = tmp_path / "made.ipynb"
    done = run_python(Path(notebooks.__file__).read_text(encoding="utf-8"), str(path), str(made), folder=tmp_path,
                      has_djinn=True)
    assert done.returncode == 0, done.stderr
    again = json.loads(made.read_text(encoding="utf-8"))
    cells = notebooks.code_cells(stored)
    assert cells
    for cell, fresh in zip(cells, notebooks.code_cells(again), strict=True):
        assert notebooks.text_of(cell) == notebooks.text_of(fresh), f"in the cell {''.join(cell['source'])}"


@pytest.mark.parametrize("name", ["Residual", "First", "RoundTrips"])
def test_a_plugin_takes_at_most_ten_lines_of_a_cell(name: str) -> None:
    cells = notebooks.code_cells(json.loads((ROOT / "docs/notebooks/what_a_graph_means.ipynb").read_text()))
    (source,) = ["".join(cell["source"]) for cell in cells if f"class {name}:" in "".join(cell["source"])]
    assert f"djinn.plugins.register({name}())" in source
    assert len([line for line in source.splitlines() if line.strip()]) <= 10
