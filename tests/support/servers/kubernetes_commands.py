"""A stand-in for kubectl: a Pod is a process of this machine, and another one attends to its Job.

usage: kubernetes_commands.py FOLDER ARGUMENTS. It does what the documentation of kubectl says about the options that it
knows, and refuses others. All that they share is in the folder: a file for each object, a folder for each Pod, and
files that stand for events, such as ``held`` (no node has room).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from slurm_commands import TICK_S, Files, detach, kill, options_of, reap

NODE = "node-1"
ENDED = {"Succeeded", "Failed"}


def matches(found: dict, options: dict) -> bool:
    name, _, value = options["selector"].partition("=")
    return found["metadata"]["labels"].get(name) == value


def objects_of(folder: Path, kind: str) -> dict[Path, dict]:
    return {path: json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))}


def pods_of(folder: Path) -> list[Files]:
    return [Files(path.parent) for path in sorted(folder.glob("pods/*/object"))]


def create(folder: Path, options: dict, others: list[str]) -> None:
    assert (options, others) == ({"filename": "-"}, [])
    for made in json.load(sys.stdin)["items"]:
        kind, name = made["kind"], made["metadata"]["name"]
        path = folder / f"{kind}-{name}.json"
        if path.exists():
            sys.exit(f'Error from server (AlreadyExists): {kind.lower()}s "{name}" already exists')
        path.write_text(json.dumps(made))
        if kind == "Job" and not os.fork():
            detach()
            while path.exists() and run_pod(folder, name, made["spec"]["template"]):
                pass
            os._exit(0)


def run_pod(folder: Path, job: str, template: dict) -> bool:
    """Run a Pod; return whether the Job needs another one."""
    import subprocess

    name, spec = f"{job}-{os.urandom(3).hex()}", template["spec"]
    pod = Files(folder / "pods" / name)
    (pod.folder / "tmp").mkdir(parents=True)
    pod.put("phase", "Pending")
    pod.put("object", json.dumps({
        "kind": "Pod", "metadata": {"name": name, "creationTimestamp": str(time.time_ns()), **template["metadata"]},
        "spec": spec | {"nodeName": NODE}}))
    while (folder / "held").exists() and not pod.get("grace"):
        time.sleep(TICK_S)
    (container,) = spec["containers"]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "TMPDIR": str(pod.folder / "tmp")}
    for each in container["env"]:
        environment[each["name"]] = secret_of(folder, each["valueFrom"]["secretKeyRef"]).decode()
    for mount in container["volumeMounts"]:
        (volume,) = [each for each in spec["volumes"] if each["name"] == mount["name"]]
        (key,) = [each["key"] for each in volume["secret"]["items"] if each["path"] == mount["subPath"]]
        # It has the files of this machine.
        assert secret_of(folder, {"name": volume["secret"]["secretName"], "key": key}) == Path(
            mount["mountPath"]).read_bytes()
    if not pod.get("grace"):
        with (pod.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *container["command"][1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=pod.folder, start_new_session=True)
        pod.put("environment", json.dumps(environment))
        pod.put("pid", process.pid)
        pod.put("phase", "Running")
        deadline = 0.0
        while process.poll() is None and not (deadline and time.monotonic() > deadline):
            time.sleep(TICK_S)
            if not deadline and (grace := pod.get("grace")):
                deadline = time.monotonic() + int(grace)
                process.send_signal(signal.SIGTERM)
        kill(signal.SIGKILL)
        status = process.wait()
        reap()
        (pod.folder / "pid").unlink()
        pod.put("phase", "Failed" if status else "Succeeded")
    if pod.get("grace"):
        (pod.folder / "object").unlink()
        return True
    return bool(status)


def secret_of(folder: Path, key: dict) -> bytes:
    import base64

    found = json.loads((folder / f"Secret-{key['name']}.json").read_text())
    return base64.b64decode(found["data"][key["key"]])


def get(folder: Path, options: dict, others: list[str]) -> None:
    assert (others, options["output"]) == (["jobs,pods"], "json")
    items = list(objects_of(folder, "Job").values())
    for pod in pods_of(folder):
        found = json.loads(pod.get("object") or "null")
        if found is None:
            continue
        found["status"] = {"phase": (phase := pod.get("phase")), "podIP": "127.0.0.1" if phase == "Running" else ""}
        if phase == "Pending":
            found["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                              "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."}]
        elif phase == "Failed":
            found["status"]["containerStatuses"] = [{"state": {"terminated": {"reason": "Error", "exitCode": 1}}}]
        if pod.get("grace"):
            found["metadata"]["deletionTimestamp"] = "now"
        items.append(found)
    json.dump({"items": [each for each in items if matches(each, options)]}, sys.stdout)


def execute(folder: Path, options: dict, others: list[str]) -> None:
    name, *words = others
    pod = Files(folder / "pods" / name)
    if options != {"container": "program"} or pod.get("phase") != "Running":
        sys.exit("error: unable to upgrade connection: container not found")
    os.execvpe(words[0], words, json.loads(pod.get("environment")))


def logs(folder: Path, options: dict, others: list[str]) -> None:
    (name,) = others
    log = folder / "pods" / name / "log"
    if not log.exists():
        sys.exit(f'Error from server (BadRequest): container "program" in pod "{name}" is waiting to start')
    print(*log.read_text().splitlines()[-int(options["tail"]):], sep="\n")


def delete(folder: Path, options: dict, others: list[str]) -> None:
    (kinds,) = others
    deadline = time.monotonic() + int(options["timeout"].removesuffix("s"))
    if kinds == "pods":
        ending = [pod for pod in pods_of(folder) if matches(json.loads(pod.get("object")), options)]
        for pod in ending:
            pod.put("grace", options["grace-period"])
            if pod.get("phase") in ENDED:
                (pod.folder / "object").unlink()
        while any((pod.folder / "object").exists() for pod in ending):
            if time.monotonic() > deadline:
                sys.exit("error: timed out waiting for the condition")
            time.sleep(TICK_S)
        return
    assert kinds != "jobs" or options["cascade"] == "orphan"
    for kind in kinds.split(","):
        for path, found in objects_of(folder, kind.removesuffix("s").capitalize()).items():
            if matches(found, options):
                path.unlink()


def config(folder: Path, options: dict, others: list[str]) -> None:
    assert (others, options) == (["view"], {"minify": "", "output": "json"})
    json.dump({"current-context": "here", "contexts": [{"name": "here", "context": {"namespace": "lab"}}]}, sys.stdout)


def main(folder: Path, arguments: list[str]) -> None:
    if (folder / "silent").exists():
        sys.exit("Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout")
    given = arguments.index("--") if "--" in arguments else len(arguments)
    options, (verb, *others) = options_of(
        "kubectl", arguments[:given],
        "namespace context filename selector output tail cascade grace-period timeout minify container")
    if verb != "config":
        assert (options.pop("namespace"), options.pop("context")) == ("lab", "here")
    {"create": create, "get": get, "exec": execute, "logs": logs, "delete": delete, "config": config}[verb](
        folder, options, [*others, *arguments[given + 1:]])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
