"""The command kubectl, for the objects of one cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.engines import run_command
from djinn_plugins.cluster.kubernetes.objects import CONTAINER, LABEL, PROGRAM

__all__ = ("COMMAND", "Kubectl", "Pod", "here")

COMMAND = "kubectl"
DELETING_S = 120
"""How long Kubernetes may take to delete Pods, in addition to the time that these have."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The namespace of this process, if it is in a Pod."""
_NEVER_BEGIN = frozenset({"CreateContainerConfigError", "ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName"})


@attrs.frozen
class Pod:
    """What Kubernetes says about a Pod.

    Attributes:
        name: Its name.
        program: The name of its program.
        created: When it was made.
        phase: ``Pending``, ``Running``, ``Succeeded``, ``Failed`` or ``Unknown``.
        is_ending: Whether it is being deleted.
        node: Where it runs, or will run.
        address: Its IP address.
        reason: Why it does not run.
        cannot_begin: Whether it cannot run before the user changes something.
    """

    name: str
    program: str
    created: str
    phase: str
    is_ending: bool = False
    node: str = ""
    address: str = ""
    reason: str = ""
    cannot_begin: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its processes have ended."""
        return self.phase in ("Failed", "Succeeded")

    @property
    def rank(self) -> tuple[bool, bool, str]:
        """Greatest for the Pod that stands for its program."""
        return not self.is_ending, not self.has_ended, self.created


@attrs.frozen
class Kubectl:
    """Where the objects are.

    Attributes:
        context: The context of kubectl's configuration; empty in a Pod.
        namespace: The namespace.
        run: The value of their label.
    """

    context: str
    namespace: str
    run: str

    def create(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Make objects that do not exist. They may be secret, so they go through standard input.

        Raises:
            ConfigurationError: Kubernetes refuses one.
        """
        made = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self._do("create", "--filename=-", given=json.dumps(made))

    def look(self) -> tuple[set[str], list[Pod]]:
        """Return the programs that have a Job, and the Pods.

        Raises:
            ConfigurationError: Kubernetes does not answer.
        """
        found = json.loads(self._do("get", "jobs,pods", self._selector, "--output=json"))["items"]
        jobs = {each["metadata"]["labels"][PROGRAM] for each in found if each["kind"] == "Job"}
        return jobs, [_pod(each) for each in found if each["kind"] == "Pod"]

    def read(self, pod: Pod, script: str) -> str:
        """Run a script of the shell in a Pod; return what it prints, and nothing if it fails or cannot be run."""
        try:
            return self.execute(pod, "sh", "-c", script)
        except ConfigurationError:
            return ""

    def execute(self, pod: Pod, *words: str) -> str:
        """Run a command in a Pod, and return what it prints.

        Raises:
            ConfigurationError: It fails, or cannot be run.
        """
        return self._do("exec", pod.name, f"--container={CONTAINER}", "--", *words)

    def log(self, pod: Pod, lines: int) -> str:
        """Return the end of what a Pod has written; nothing if it has not begun."""
        try:
            return self._do("logs", pod.name, f"--container={CONTAINER}", f"--tail={lines}")
        except ConfigurationError:
            return ""

    def delete(self, grace_s: int) -> None:
        """Delete all objects, and wait until there are none.

        Args:
            grace_s: After how many seconds Pods are killed.

        Raises:
            ConfigurationError: Kubernetes does not answer, or Pods do not end.
        """
        # A Job would give its Pods their own time to end, or replace them.
        self._delete("jobs", "--cascade=orphan")
        self._delete("pods", f"--grace-period={grace_s}", patience_s=grace_s)
        self._delete("services,secrets")

    def _delete(self, kinds: str, *options: str, patience_s: int = 0) -> None:
        patience_s += DELETING_S
        self._do("delete", kinds, self._selector, *options, f"--timeout={patience_s}s", timeout_s=patience_s + 10)

    @property
    def _selector(self) -> str:
        return f"--selector={LABEL}={self.run}"

    def _do(self, verb: str, *words: str, given: str = "", timeout_s: float = 60.0) -> str:
        where = [f"--namespace={self.namespace}", *([f"--context={self.context}"] if self.context else [])]
        return run_command([COMMAND, *where, verb, *words], given=given, timeout_s=timeout_s)


def here(run: str) -> Kubectl:
    """Return where objects are made now: in the current context and namespace of kubectl, or else in those of this Pod.

    Raises:
        ConfigurationError: kubectl does not know a cluster.
    """
    try:
        said: dict[str, Any] = json.loads(run_command([COMMAND, "config", "view", "--minify", "--output=json"]))
    except ConfigurationError:
        if not _NAMESPACE.exists():
            raise
        return Kubectl("", _NAMESPACE.read_text().strip(), run)
    return Kubectl(said["current-context"], said["contexts"][0]["context"].get("namespace") or "default", run)


def _pod(found: Mapping[str, Any]) -> Pod:
    data, spec, status = found["metadata"], found["spec"], found.get("status", {})
    states = [state for each in status.get("containerStatuses", []) for state in each.get("state", {}).values()]
    waits = [*states, *(each for each in status.get("conditions", []) if each["status"] == "False"), status]
    said: Mapping[str, str] = next((each for each in waits if each.get("reason")), {})
    return Pod(
        data["name"], data["labels"][PROGRAM], data["creationTimestamp"], status.get("phase", "Unknown"),
        "deletionTimestamp" in data, spec.get("nodeName", ""), status.get("podIP", ""),
        ": ".join(filter(None, map(said.get, ("reason", "message")))), said.get("reason") in _NEVER_BEGIN)
