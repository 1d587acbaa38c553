"""The settings of Pods."""

from __future__ import annotations

import attrs

from djinn.settings import setting

__all__ = ("KubernetesSettings",)


@attrs.frozen
class KubernetesSettings:
    """What `djinn cluster up --engine kubernetes` starts."""

    kubernetes_image: str = setting(
        "djinn", help="image of the programs that `djinn cluster up --engine kubernetes` starts")
    kubernetes_pod: str = setting(
        "", help="file with further fields of their Pods, as JSON; `container` has those of the container, such as "
                 "`resources`")
