"""The names by which a server's pages of metrics may be asked for."""

from __future__ import annotations

from types import SimpleNamespace

from djinn_plugins.server.kinds.metrics import Counts
from djinn_plugins.server.options import MetricsOptions
from djinn_plugins.server.prometheus.exposition import MetricsPage


def test_a_page_that_leads_a_foreign_name_to_this_machine_reads_nothing() -> None:
    source = SimpleNamespace(totals=dict, gateway=Counts, version="1", why_not_ready=str)
    page = MetricsPage(MetricsOptions(port=0, names="metrics.djinn.svc, Gpu-1"), source)
    hosts = ("evil.example", "evil.example:80", "", "localhost", "127.0.0.1:1", "[::1]", "gpu-1:90",
             "metrics.djinn.svc")
    for path in ("/programs", "/metrics"):
        assert [page._answer("GET", path, {"host": host}, "127.0.0.1")[0] for host in hosts] == [421] * 3 + [200] * 5
    for path in ("/healthz", "/readyz"):
        assert {page._answer("GET", path, {"host": host}, "127.0.0.1")[0] for host in hosts} == {200}
    page.stop()
