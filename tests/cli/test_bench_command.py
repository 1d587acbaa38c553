"""``djinn bench``: measured on a guarded server in another process, and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.warm import WarmPython, clean_environment, run_djinn

from djinn_plugins.cli.bench.plot import bar, histogram, print_report
from djinn_plugins.cli.bench.report import BenchReport, Comparison, Latency, Throughput


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    program = "from djinn_plugins.cli.app import main; main()"
    with WarmPython(program, ["serve", "--device", "cpu", "--threads", "1", "--drain-s", "0"],
                    environment=clean_environment(), log=tmp_path / "log", has_djinn=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()
        process.wait(30)


def test_a_server_is_measured_and_generates_the_same_tokens(server: str) -> None:
    done = run_djinn("bench", "--server", server, "--seconds", "1", "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["address"], found["device"], found["same_tokens"]) == (server, "cpu", True)
    latency = found["latency"]
    assert len(latency["samples_s"]) == latency["count"]
    assert 0 < min(latency["samples_s"]) <= latency["median_s"] <= latency["p90_s"] <= max(latency["samples_s"]) < 60
    assert [each["size_bytes"] for each in found["throughput"]] == [2**16, 2**20, 2**24, 2**26]
    for rates in (*found["throughput"], found["operations"], found["tokens"]):
        assert all(0 < rate < 1e12 for name, rate in rates.items() if name.endswith("_s"))
    # A round trip is part of each token.
    assert found["tokens"]["remote_per_s"] < 1 / min(latency["samples_s"])


def test_a_server_that_is_not_there_is_one_message() -> None:
    done = run_djinn("bench", "--server", "tcp://127.0.0.1:1", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("djinn: [DJ301]")


def test_the_report_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(BenchReport(
        "tcp://h:1", "cuda:0", Latency(3, 0.002, 0.004, (0.001, 0.002, 0.004)),
        (Throughput(2**16, 5e7, 2.5e7), Throughput(2**26, 1e8, 5e7)), Comparison(1e4, 2e4), Comparison(300.0, 100.0),
        same_tokens=False))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tcp://h:1 computes on cuda:0"
    assert "Latency     2.00 ms, 90% below 4.00 ms, 3 round trips" in lines
    assert {line.split()[0] for line in lines if "MB/s" in line} == {"64", "down"}
    assert [line.count("█") for line in lines if "MB/s" in line] == [16, 8, 32, 16]
    assert "Small GPT  3.00 times the rate of PyTorch on this machine's CPU" in lines
    assert "differ" in lines[-1]


@pytest.mark.parametrize(("part", "drawn"), [
    (0.0, "    "), (1.0, "████"), (0.5, "██  "), (0.28125, "█▏  "), (9.0, "████")])
def test_a_bar_has_eighths(part: float, drawn: str) -> None:
    assert bar(part, 4) == drawn


def test_a_histogram_shows_each_value_that_occurs() -> None:
    assert histogram([1.0, 1.0, 1.0, 1.0, 10.0, 100.0], 3) == ("█▂▂", 1.0, 100.0)
    assert histogram([2.0], 4)[0].strip() == "█"
