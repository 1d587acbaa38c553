"""Looks for kernels that reach memory that is not their own, behind the guard that a server asks.

Every overload that the guard allows is called with arguments that are changed in one to three places, in processes
whose memory ends where a tensor ends; see guarded_memory.c.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from djinn_plugins.common.operators.operators import LAYER_OPERATORS, operator_named
from djinn_plugins.common.operators.random_exchange import EXCHANGE
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.guard.allowlist import ALLOWED, lists, release

HERE = Path(__file__).parent
SOURCE = HERE / "guarded_memory.c"
NOT_CALLED = HERE / "not_called.toml"
HUNG = "more than"
"""How the description of a call begins that took too long."""
UNTRAVELLED = ("Dimname", "Storage", "Stream")
"""Types of arguments that no program can carry."""


def obstacle() -> str:
    """Say why memory cannot be guarded here; empty if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return "memory is guarded on Linux with glibc on x86-64"
    return "" if shutil.which("cc") else "a C compiler is needed"


def build(folder: Path) -> Path:
    """Compile what is preloaded."""
    made = folder / "guarded_memory.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", made, SOURCE, "-ldl", "-lpthread"], check=True)
    return made


def allowed() -> list[str]:
    """Name the overloads of PyTorch that a server runs."""
    return sorted(name for name, group in lists()[release()].items() if group == ALLOWED)


def own() -> list[str]:
    """Name the operators of djinn that compute what a client asks for, of tensors that it chooses."""
    # It defines them.
    CpuExecutor()
    return sorted((*LAYER_OPERATORS, EXCHANGE))


def without_form(name: str) -> str:
    """Name the type of an argument that a call of an overload needs and that no program can carry; empty for none."""
    kinds = [str(argument.real_type) for argument in operator_named(name)._schema.arguments
             if not argument.has_default_value()]
    return next((kind for kind in kinds for word in (*UNTRAVELLED, "Generator") if word in kind
                 and "Optional" not in kind), "")


def not_called() -> dict[str, str]:
    """Read which overloads no call of was found that runs, and why."""
    return _reasons("group")


def not_strided() -> dict[str, str]:
    """Read which overloads run with no operand that is expanded, overlaps itself or is transposed, and why."""
    return _reasons("strides")


def _reasons(kind: str) -> dict[str, str]:
    groups = tomllib.loads(NOT_CALLED.read_text(encoding="utf-8"))[kind]
    return {name: group["reason"] for group in groups for name in group["overloads"]}


@attrs.frozen
class Settings:
    """How thoroughly to look.

    Attributes:
        target: How many calls of each overload shall run.
        attempts: How many are tried at most, of each.
        seconds: How long each may take at most.
        dtypes, samples, families: How much of the databases is recorded, and how many families of models.
        proposals: How many calls are made up for an overload that the databases hardly call.
        seed: Of all that is left to chance.
        crashes: After so many, an overload is left alone.
        capability: Vector instructions of kernels, as ``ATEN_CPU_CAPABILITY`` has it; empty for the best.
    """

    target: int
    attempts: int
    seconds: float
    dtypes: int = 7
    samples: int = 4
    families: int = 0
    proposals: int = 40
    seed: int = 0
    crashes: int = 60
    capability: str = ""


@attrs.frozen
class Found:
    """What came of calls.

    Attributes:
        overloads: By name: ``outcomes``, and ``ran_with``, how many of the calls that ran were changed in what way.
        findings: Calls that reached beyond their memory, or ended their process, each made again in a second one.
        hangs: Calls that took longer than a call may.
        seconds: How long the calls took, in all processes together.
    """

    overloads: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    hangs: Sequence[Mapping[str, Any]]
    seconds: float

    def total(self, outcome: str) -> int:
        """How many calls had an outcome."""
        return sum(entry["outcomes"][outcome] for entry in self.overloads.values())

    def changed(self, kind: str) -> int:
        """How many of the calls that ran were changed in a way."""
        return sum(entry["ran_with"].get(kind, 0) for entry in self.overloads.values())

    def ran(self, name: str) -> int:
        """How many calls of an overload ran."""
        return int(self.overloads[name]["outcomes"]["ran"])


def look(
    names: Sequence[str], settings: Settings, library: Path, corpus: Path, result: Path,
    planted: Sequence[str] = (), behind: Mapping[str, Any] = MappingProxyType({}), limit_s: float = 3600,
) -> dict[str, Any]:
    """Call overloads, in a process of its own and what that forks.

    Args:
        names: The overloads.
        settings: How thoroughly.
        library: What `build` made.
        corpus: Keeps the calls that are changed.
        result: Where to write what came of it.
        planted: Kinds of holes for which kernels are stood in; see `support.operators.planted`.
        behind: Attributes of the job that differ when it is done behind a guard that has forgotten the rules about
            those, too.
        limit_s: How long it may take.

    Raises:
        AssertionError: The fuzzer failed.
    """
    job = {"overloads": list(names), "planted": list(planted), "behind": dict(behind), "corpus": str(corpus),
           "result": str(result),
           **{key: value for key, value in attrs.asdict(settings).items() if key != "capability"}}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "support.operators.runs", file.name],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, **environment(library, settings.capability)}, check=False, timeout=limit_s)
    assert not done.returncode, done.stderr.decode(errors="replace")[-4000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def environment(library: Path, capability: str = "") -> dict[str, str]:
    """Name the environment variables of a process whose memory is guarded."""
    root = HERE.parents[2]
    paths = (HERE.parents[1], root, root / "plugins", root / "conformance")
    return {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            **({"ATEN_CPU_CAPABILITY": capability} if capability else {})}


def look_everywhere(
    names: Sequence[str], rounds: Sequence[Settings], folder: Path, corpus: Path, parts: int, processes: int,
    lacking: Callable[[Found], Sequence[str]], last: Settings,
) -> Found:
    """Call overloads part by part; parts that `folder` has from a run that was interrupted are not done again.

    Args:
        names: The overloads.
        rounds: How thoroughly, one after the other.
        folder: Keeps what came of each part.
        corpus: Keeps the calls that are changed.
        parts: How many there are.
        processes: How many run side by side.
        lacking: Names overloads for which that was not enough.
        last: How thoroughly to look at those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = build(folder)

    def do(chosen: Sequence[str], settings: Settings, name: str) -> dict[str, Any]:
        result = folder / f"{name}.json"
        if result.exists():
            made: dict[str, Any] = json.loads(result.read_text())
        else:
            made = look(chosen, settings, library, corpus, result, limit_s=4 * 3600)
            ran = sum(entry["outcomes"]["ran"] for entry in made["overloads"].values())
            print(f"{name} of {parts}: {ran} calls ran, {len(made['findings'])} findings", flush=True)
        return made

    def do_part(part: int, number: int) -> dict[str, Any]:
        return do(names[part::parts], rounds[number], f"part-{part}-{number}")

    with ThreadPoolExecutor(processes) as pool:
        # The first records the databases, the others take what it has recorded.
        first = do_part(0, 0)
        others = [pool.submit(do_part, part, number) for number in range(len(rounds)) for part in range(parts)
                  if part or number]
        results = [first, *(future.result() for future in others)]
        more = lacking(merged(results))
        marked = f"more-{hashlib.blake2b(' '.join(more).encode(), digest_size=4).hexdigest()}"
        added = [pool.submit(do, more[index::processes], last, f"{marked}-{index}")
                 for index in range(processes) if more[index::processes]]
        return merged([*results, *(future.result() for future in added)])


def merged(results: Sequence[Mapping[str, Any]]) -> Found:
    """Add up what came of several jobs."""
    overloads: dict[str, dict[str, Any]] = {}
    findings: list[Mapping[str, Any]] = []
    for result in results:
        findings += result["findings"]
        for name, entry in result["overloads"].items():
            known = overloads.setdefault(name, {"outcomes": {}, "ran_with": {}, "said": ""})
            known["said"] = known["said"] or entry["said"]
            for kind in ("outcomes", "ran_with"):
                for key, count in entry[kind].items():
                    known[kind][key] = known[kind].get(key, 0) + count
    hangs = [finding for finding in findings if finding["kind"].startswith(HUNG)]
    return Found(overloads, [finding for finding in findings if finding not in hangs], hangs,
                 sum(result["seconds"] for result in results))


def told(finding: Mapping[str, Any]) -> str:
    """Say what was found in one line."""
    return (f"{finding['overload']}: {finding['kind']}, with {', '.join(finding['changed'])}"
            f"{'' if finding['again'] else ' (not again in a second process)'}: {finding['call']}")


def digest(*folders: str) -> str:
    """Name the state of what calls are made with, and of folders: what was found is good as long as it is the same."""
    root = HERE.parents[2]
    files = [SOURCE, *HERE.glob("*.py"), *(file for folder in folders for file in (root / folder).rglob("*.*"))]
    made = hashlib.blake2b(release().encode(), digest_size=8)
    for file in sorted(files):
        if file.suffix in {".py", ".toml", ".txt", ".c"}:
            made.update(file.read_bytes())
    return made.hexdigest()
