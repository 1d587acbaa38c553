"""The metrics of a cluster's servers."""

from __future__ import annotations

from djinn.errors import ConfigurationError
from djinn.settings import Config
from djinn_plugins.cluster.asking import ask
from djinn_plugins.cluster.messages import Resolve
from djinn_plugins.common.settings.cluster import ClusterSettings
from djinn_plugins.common.settings.connection import TlsSettings, configured_here

__all__ = ("metrics_of_cluster",)


def metrics_of_cluster() -> str:
    """Return the URL of the metrics of the server that the cluster's directory leads to; empty without a cluster.

    Raises:
        ConfigurationError: That server serves no metrics.
        DjinnError: The directory does not answer, or names no server.
    """
    plugins = configured_here()
    config, cluster = plugins.settings(Config), plugins.settings(ClusterSettings).cluster
    if not cluster:
        return ""
    server = ask(cluster, lambda name: Resolve(config.token, name), authorities=plugins.settings(TlsSettings).tls_ca,
                 timeout_s=config.connect_timeout_s)[0]
    if not server.metrics:
        raise ConfigurationError(f"{server.address}, which the directory leads to, serves no metrics.",
                                 hint="Start the cluster's servers with --metrics-port 0, or give --metrics "
                                      "http://HOST:PORT.")
    return server.metrics
