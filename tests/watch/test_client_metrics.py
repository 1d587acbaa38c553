"""What a client counts and logs of itself: `djinn.metrics`, and the components of its log."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import djinn

DEVICE = "remote_accelerator:0"
NAMED = ("capture_operations_total", "capture_duration_seconds_count", "shape_inference_failures_total",
         "schedule_duration_seconds_count", "execution_duration_seconds_count", "remote_execution_success_rate",
         "memory_usage_bytes", "memory_pressure_events_total", "cache_hits_total", "cache_misses_total",
         "cache_evictions_total", "execution_strategy_used", "schedule_strategy_used")
"""The series that earlier documents name."""
COMPONENTS = ("interception", "shape_inference", "execution")


@pytest.fixture
def server(start_server: Any) -> Iterator[Any]:
    yield start_server()
    djinn.shutdown()
    for component in ("", *COMPONENTS):
        logging.getLogger(f"djinn.{component}" if component else "djinn").setLevel(logging.NOTSET)


def samples() -> dict[str, float]:
    """The samples by name and labels."""
    return {" ".join([sample.name.removeprefix("djinn_"), *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(djinn.metrics()) for sample in family.samples}


def step(x: torch.Tensor) -> float:
    return float(((x @ x).relu() + 1).sum())


def test_each_named_series_counts_what_a_client_does(server: Any) -> None:
    djinn.init(server.address)
    x = torch.ones(64, 64, device=DEVICE)
    before = samples()
    for _ in range(20):
        x.neg_()  # what was written since is not answered from memory
        assert step(x) == 64 * 64 * 65
    torch.nonzero(x).shape  # noqa: B018  # the executor alone knows it
    djinn.synchronize()
    djinn.schedule(djinn.build_graph(torch.nn.Linear(3, 3), torch.ones(2, 3)))
    after = samples()
    found = {name: after[name] - before.get(name, 0) for name in after}
    assert found["capture_operations_total"] >= 20 * 4
    assert 3 < found["capture_duration_seconds_count"] < 20
    assert found["shape_inference_failures_total"] == 1
    assert found["execution_duration_seconds_count"] >= 20
    assert found["execution_duration_seconds_sum"] > 0
    assert found["execution_strategy_used subgraph"] >= 20
    assert found["execution_strategy_used local"] == 0
    assert found["cache_hits_total graph"] >= 15
    assert 1 <= found["cache_misses_total graph"] <= 8
    assert found["schedule_strategy_used latency"] == 1
    used = [count for name, count in found.items() if name.startswith("schedule_strategy_used")]
    assert sum(used) == found["schedule_duration_seconds_count"]
    assert found["memory_pressure_events_total critical"] == 0
    assert after["remote_execution_success_rate"] > 0.5
    assert after[f"memory_usage_bytes {DEVICE}"] >= x.numel() * 4
    assert not [name for name in NAMED if not any(each.startswith(name) for each in after)]


def test_several_servers_count_as_one_does(server: Any, start_server: Any) -> None:
    servers = [server.address, start_server().address]
    chosen = "scheduler=throughput"
    for placement, plugins, strategy in (("automatic", "", "latency"), ("automatic", chosen, "throughput"),
                                         ("explicit", "", ""), ("phases", "", "")):
        djinn.init(servers=servers, placement=placement, plugins=plugins)
        x, before = torch.ones(64, 64, device=DEVICE), samples()
        for _ in range(4):
            x.neg_()
            assert step(x) == 64 * 64 * 65
        torch.nonzero(x).shape  # noqa: B018  # the executor alone knows it
        after = samples()
        found = {name: after[name] - before.get(name, 0) for name in after}
        used = {name.split()[1]: count for name, count in found.items() if "schedule_strategy" in name and count}
        assert list(used) == ([strategy] if strategy else []), placement
        assert sum(used.values()) == found["schedule_duration_seconds_count"]
        assert bool(found["schedule_duration_seconds_sum"]) == bool(strategy)
        assert found["execution_duration_seconds_count"] >= 4, placement
        assert found["shape_inference_failures_total"] == 1, placement
        assert after[f"memory_usage_bytes {DEVICE}"] >= x.nbytes, placement
        djinn.shutdown()


def test_counters_continue_with_the_next_session_and_none_is_started(server: Any) -> None:
    djinn.init(server.address)
    step(torch.ones(8, 8, device=DEVICE))
    first = samples()
    djinn.shutdown()
    ended = samples()
    assert not djinn.is_initialized()
    assert ended["capture_operations_total"] == first["capture_operations_total"]
    djinn.init(server.address)
    step(torch.ones(8, 8, device=DEVICE))
    assert samples()["capture_operations_total"] > ended["capture_operations_total"]


def test_a_server_that_died_is_a_failure_and_the_metrics_remain(server: Any) -> None:
    djinn.init(server.address)
    x = torch.ones(8, 8, device=DEVICE)
    step(x)
    assert samples()["remote_execution_success_rate"] > 0
    failed = 1 - samples()["remote_execution_success_rate"]
    (worker,) = server.workers
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(djinn.TransportError):
        step(x)
    found = samples()
    assert 1 - found["remote_execution_success_rate"] > failed
    assert not [name for name in found if name.startswith("memory_usage_bytes")]


def test_each_component_logs_what_it_does(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    djinn.init(server.address, log_level="DEBUG", log_component=",".join(COMPONENTS))
    step(torch.ones(5, 7, 7, device=DEVICE)[0])
    said = {component: [record.getMessage() for record in caplog.records if record.name == f"djinn.{component}"]
            for component in COMPONENTS}
    assert any("aten::relu" in text and "[7, 7]" in text for text in said["interception"])
    assert any("relu" in text and "inferred" in text for text in said["shape_inference"])
    assert any("answered" in text and server.address in text for text in said["execution"])
    assert {record.name for record in caplog.records if record.levelno == logging.DEBUG} <= {
        f"djinn.{component}" for component in COMPONENTS}


def test_without_a_level_that_of_the_application_holds(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    for component in ("", *COMPONENTS):
        logging.getLogger(f"djinn.{component}".removesuffix(".")).setLevel(logging.NOTSET)
    for level, is_shown in ((logging.DEBUG, True), (logging.WARNING, False)):
        caplog.clear()
        with caplog.at_level(level):
            djinn.init(server.address)
            step(torch.ones(5, 7, 7, device=DEVICE)[0])
        assert any(record.name == "djinn.interception" for record in caplog.records) is is_shown


def test_a_component_is_switched_while_a_session_runs_and_costs_nothing_when_off(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    session = djinn.init(server.address)
    x = torch.ones(6, 6, device=DEVICE)
    plain = session.tape.nodes.append
    assert session.recorder.append == plain
    step(x)
    assert not caplog.records
    djinn.set_debug_level("interception")
    step(x)
    assert {record.name for record in caplog.records} == {"djinn.interception"}
    caplog.clear()
    djinn.set_debug_level("interception", "WARNING")
    step(x)
    assert not caplog.records
    assert session.recorder.append == plain


def test_a_slow_shape_rule_is_counted_and_named(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    library = torch.library.Library("djinn_slow_rule", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    def slow(x: torch.Tensor) -> torch.Tensor:
        begin_s = time.thread_time()
        while time.thread_time() - begin_s < 0.3:
            pass
        return torch.empty_like(x)

    library.impl("twice", slow, "Meta")
    djinn.init(server.address)
    djinn.set_debug_level("shape_inference", "INFO")
    before = samples()["slow_shape_rules_total"]
    torch.ops.djinn_slow_rule.twice(torch.ones(3, device=DEVICE))
    assert samples()["slow_shape_rules_total"] == before + 1
    assert "djinn_slow_rule.twice" in caplog.text
