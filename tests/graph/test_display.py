"""Displays in notebooks: they tell what is known, and never make anything run."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
import torch

import djinn
from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import SemanticMetadata, WorkloadProfile


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    djinn.init(flush_every=None)
    yield
    djinn.shutdown()


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += f"{data}\n"


def read(text: str) -> str:
    tags = Tags(text)
    assert not tags.open, "every element is closed"
    assert not tags.seen & {"script", "link", "img", "iframe"}
    return tags.words


def test_a_lazy_tensor_is_shown_without_being_computed() -> None:
    x = torch.randn(3, 5, device="remote_accelerator:0") @ torch.randn(5, 2, device="remote_accelerator:0")
    before = djinn.stats()
    bundle = x._repr_mimebundle_()
    words = read(x._repr_html_())
    assert djinn.stats() == before
    assert before["pending_nodes"] == 3
    assert bundle["text/plain"] == "LazyTensor(float32[3, 2], device='remote_accelerator:0', pending aten::matmul)"
    assert bundle["text/html"] == x._repr_html_()
    assert "3 × 2" in words
    assert "24 B" in words


def test_what_became_of_a_lazy_tensor_is_told() -> None:
    x = torch.ones((), device="remote_accelerator:0")
    djinn.flush()
    assert "held by local://" in x._repr_mimebundle_()["text/plain"]
    djinn.shutdown()
    assert "of a session that has ended" in x._repr_mimebundle_()["text/plain"]
    assert "scalar" in read(x._repr_html_())
    assert not djinn.is_initialized(), "looking at it starts no session"


def test_an_annotated_graph_is_shown_at_a_glance_and_nothing_runs() -> None:
    with djinn.capture() as captured:
        y = torch.ones(4, 4).relu() + 1
    graph = captured.graph
    nodes = {node.id: SemanticMetadata(node.operation, module_path=f"model.<b>{node.id}", flops=2_000)
             for node in graph.nodes()}
    annotated = AnnotatedGraph(graph, nodes, {}, (PatternMatch("mlp", (graph.nodes()[1].id,)),), WorkloadProfile(
        workload="llm", patterns={"mlp": 1}, steps=(ExecutionPhase.LLM_PREFILL, *[ExecutionPhase.LLM_DECODE] * 3),
        flops=6_000, residency_bytes={"persistent_weight": 1_500_000}))
    before = djinn.stats()
    words = read(annotated._repr_html_())
    assert djinn.stats() == before
    assert repr(annotated) == "AnnotatedGraph(llm, 3 operations, 1 mlp)"
    for told in ("6 kFLOP", "llm prefill, llm decode × 3", "mlp 1", "persistent weight 1.5 MB", "model.<b>n0"):
        assert told in words
    assert y.sum().item() == 32
