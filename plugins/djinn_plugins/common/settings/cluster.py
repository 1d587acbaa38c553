"""The settings of sessions with a cluster."""

from __future__ import annotations

import attrs

from djinn.settings import setting

__all__ = ("ClusterSettings",)


@attrs.frozen
class ClusterSettings:
    """The cluster of a session, and the needs that choose its server."""

    cluster: str = setting(
        "", help="address of a cluster's directory, `tls://host:port/name`, which leads to its least loaded server; "
                 "instead of `server`")
    cluster_models: tuple[str, ...] = setting(
        (), help="names of models that the server should have in its store, if one does; in the variable, separated by "
                 "commas")
    cluster_memory_mib: int = setting(
        0, help="MiB of memory that should be left there, if some server has them", minimum=0)
