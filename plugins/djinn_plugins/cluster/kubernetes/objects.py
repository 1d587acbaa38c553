"""The objects of a cluster: a Service that names its Pods, a Secret with what they read, and a Job for each program."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.kinds import ClusterSpec, EngineProgram
from djinn_plugins.cluster.kubernetes.node import SPEC

__all__ = ("CONTAINER", "LABEL", "PROGRAM", "Objects", "name_of")

CONTAINER = "program"
LABEL = "djinn-run"
"""The label of all objects of one start of a cluster."""
PROGRAM = "djinn-program"
"""The label with the name of a program."""
USER = 10001
"""The user of the image in docs/deployment."""
GRACE_S = 40
"""How long a Pod may take to end by default: longer than a server drains and ends."""
MAX_FILE_BYTES = 2**20
"""Size of a Secret."""
AGAIN = 2**31 - 1
"""How often a Job replaces its Pod: always."""
_NODE = ("from djinn_plugins.postponing import postpone; postpone('djinn'); "
         "from djinn_plugins.cluster.kubernetes.node import main; main()")
"""The program of a Pod. It needs no PyTorch."""
_OWN = "DJINN_"


def name_of(cluster: str) -> str:
    """Return the name of a cluster's Service, which those of the other objects begin with."""
    return f"djinn-{cluster}"


@attrs.frozen
class Objects:
    """Makes the objects of a cluster.

    Attributes:
        spec: The cluster.
        run: The value of `LABEL`.
        image: The image of its Pods.
        fields: Further fields of Pods; ``container`` has those of the container.
    """

    spec: ClusterSpec
    run: str
    image: str
    fields: Mapping[str, Any] = attrs.field(factory=dict)

    def service(self) -> dict[str, Any]:
        """Return the Service. It has no address: names lead to the Pods, also before programs serve."""
        return self._object("v1", "Service", name_of(self.spec.name), spec={
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: self.run}})

    def secret(self) -> dict[str, Any]:
        """Return the Secret: the programs with their variables, and their files.

        Raises:
            ConfigurationError: A file cannot be read, or is too large.
        """
        own = {name: value for name, value in os.environ.items() if name.startswith(_OWN)}
        data = {key: _content(Path(path)) for program in self.spec.programs for key, path in self._files(program)}
        for program in self.spec.programs:
            kept = attrs.evolve(program, variables={**own, **program.variables})
            data[program.name] = msgspec.json.encode(ClusterSpec(self.spec.name, (kept,)))
        return self._object("v1", "Secret", name_of(self.spec.name), immutable=True, data={
            key: base64.b64encode(content).decode() for key, content in data.items()})

    def jobs(self) -> list[dict[str, Any]]:
        """Return the Jobs."""
        return [self._object(
            "batch/v1", "Job", f"{name_of(self.spec.name)}-{program.name}", program.name,
            spec={"backoffLimit": AGAIN, "template": {
                "metadata": {"labels": self._labels(program.name)}, "spec": self._pod(program)}})
            for program in self.spec.programs]

    def _object(self, version: str, kind: str, name: str, program: str = "", **fields: Any) -> dict[str, Any]:
        metadata = {"name": name, "labels": self._labels(program)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}

    def _labels(self, program: str) -> dict[str, str]:
        return {"app": name_of(self.spec.name), LABEL: self.run, **({PROGRAM: program} if program else {})}

    def _pod(self, program: EngineProgram) -> dict[str, Any]:
        name, files = name_of(self.spec.name), list(self._files(program))
        container: dict[str, Any] = {
            "name": CONTAINER, "image": self.image, "command": ["python", "-c", _NODE],
            "env": [{"name": SPEC, "valueFrom": {"secretKeyRef": {"name": name, "key": program.name}}}],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": "files", "mountPath": path, "subPath": key, "readOnly": True}
                             for key, path in files]}
        if program.gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": program.gpus}}
        pod = {
            "restartPolicy": "Never", "hostname": program.name, "subdomain": name,
            "terminationGracePeriodSeconds": GRACE_S, "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER,
                                "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "files", "secret": {"secretName": name, "defaultMode": 0o440, "items": [
                {"key": key, "path": key} for key, _ in files]}}] if files else []}
        further = dict(self.fields)
        return _merged({**pod, "containers": [_merged(container, further.pop("container", {}))]}, further)

    def _files(self, program: EngineProgram) -> Iterator[tuple[str, str]]:
        """List keys and paths of a program's files."""
        paths = sorted({path for each in self.spec.programs for path in each.files})
        return ((f"file-{paths.index(path)}", path) for path in program.files)


def _merged(given: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Add fields: those of mappings are merged, lists are joined, and others are replaced."""
    merged = dict(given)
    for name, value in further.items():
        match merged.get(name), value:
            case dict() as known, dict():
                merged[name] = _merged(known, value)
            case list() as listed, list():
                merged[name] = [*listed, *value]
            case _:
                merged[name] = value
    return merged


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}.",
                                 hint="Give files that this user can read.") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path} has more than {MAX_FILE_BYTES} bytes, and does not fit into a Secret.",
                                 hint="Let it be a part of the image.")
    return content
