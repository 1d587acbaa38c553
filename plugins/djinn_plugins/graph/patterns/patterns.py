"""The patterns by name: each is a search in the shared index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.attention import find_attentions
from djinn_plugins.graph.patterns.caches import find_caches
from djinn_plugins.graph.patterns.convolution import find_convolutions
from djinn_plugins.graph.patterns.embedding import find_embeddings
from djinn_plugins.graph.patterns.index import Index, index_of
from djinn_plugins.graph.patterns.mlp import find_mlps
from djinn_plugins.graph.patterns.moe import find_moes
from djinn_plugins.graph.patterns.norm import find_norms
from djinn_plugins.graph.patterns.output_head import find_heads
from djinn_plugins.graph.patterns.recurrent import find_recurrences
from djinn_plugins.graph.patterns.whole_models import find_llms, find_vision_encoders


@attrs.define(eq=False)
class StructuralPattern:
    """A pattern that uses only operations, sizes and connections, searching outwards from anchors."""

    name: str
    _search: Callable[[Index], Sequence[PatternMatch]]
    capabilities: frozenset[str] = frozenset({"disjoint"})
    """No node is in two of its matches."""

    def find(self, graph: Graph) -> Sequence[PatternMatch]:
        """Find every occurrence, in program order; results are cached per graph."""
        return list(index_of(graph).once(self._search))


PATTERNS = (
    StructuralPattern("attention", find_attentions),
    StructuralPattern("kv_cache", find_caches),
    StructuralPattern("mlp", find_mlps),
    StructuralPattern("moe", find_moes),
    StructuralPattern("conv_block", find_convolutions),
    StructuralPattern("norm", find_norms),
    StructuralPattern("embedding", find_embeddings),
    StructuralPattern("head", find_heads),
    StructuralPattern("recurrent", find_recurrences),
    StructuralPattern("llm", find_llms),
    StructuralPattern("vision_encoder", find_vision_encoders),
)
