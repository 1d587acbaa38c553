"""Publishing what was found about many clients and many servers.

``python -m support.reports.scale FOUND.jsonl`` takes what a run has found into docs/results/scale.json, where it
replaces what the same part found before, and writes the generated part of docs/scale.md and its pictures anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.reports.generated_part import with_generated
from support.reports.line_chart import Axis, lines
from support.reports.performance import ROOT

DOCS = ROOT / "docs"
RESULTS = DOCS / "results" / "scale.json"
Found = Mapping[str, Any]
TIME = Axis("seconds")


def main() -> None:
    """Take in what a run has found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", type=Path, help="what the run has kept")
    published = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for line in parser.parse_args().found.read_text(encoding="utf-8").splitlines():
        published |= json.loads(line)
    parts = (f"{json.dumps(part)}: {json.dumps(found, sort_keys=True)}" for part, found in sorted(published.items()))
    RESULTS.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    written = [line for part, write in PARTS.items() if part in published for line in write(published[part])]
    page = DOCS / "scale.md"
    page.write_text(with_generated(page.read_text(encoding="utf-8"), "\n".join([*written, ""])), encoding="utf-8")


def picture(name: str, about: str, drawn: str) -> list[str]:
    """Write a picture, and return the lines that show it."""
    (RESULTS.parent / f"{name}.svg").write_text(drawn, encoding="utf-8")
    return [f"![{about}](results/{name}.svg)", ""]


def table(head: str, *rows: str) -> list[str]:
    """Write a table whose first column is text."""
    columns = head.count("|") + 1
    return [f"| {head} |", "|---|" + "---:|" * (columns - 1), *(f"| {row} |" for row in rows), ""]


def cells(values: Iterable[float], form: str) -> str:
    """Write numbers as cells of a table."""
    return " | ".join(format(value, form) for value in values)


def clients(found: Found) -> Iterator[str]:
    """Write what many clients of one server got."""
    yield from [
        "## Many clients of one server", "",
        (f"{found['date']}, {found['machine']}. {found['clients']} clients, {found['models']} models of "
         f"{found['models_mib']:.0f} MiB together, {found['minutes']:g} minutes; clients and server use the same "
         "processors."),
        ""]
    yield from table(
        "measured | value", f"sessions that began | {found['sessions']:,}",
        f"requests answered as eager PyTorch does, bit by bit | {found['answers']:,}",
        f"requests with other answers | {found['wrong']}",
        f"requests or sessions that failed | {found['lost']}",
        f"clients killed in the middle of a session, on purpose | {found['crashed']}",
        f"workers killed under load, on purpose | {found['restarted']}",
        (f"sessions of that worker, and p50 and longest time of the request that waited for a new one in s | "
         f"{found['recovered_s'][0]:g}: {cells(found['recovered_s'][1:], '.2f').replace(' |', ',')}"),
        f"p50, p90, p99 of a request in s | {cells(found['answer_s'], '.2f').replace(' |', ',')}",
        f"p50, p90, p99 of a new session with its model in s | {cells(found['session_s'], '.2f').replace(' |', ',')}",
        f"part of the time in which the device was in use | {found['device_use']:.1%}",
        f"largest memory of all processes of the server in MiB | {max(mib for _, mib in found['memory']):.0f}",
        f"processor used by the gateway | {found['gateway_share']:.1%}")
    yield from picture("scale-goodput", "Right answers per second over time", lines(
        "Right answers per second", TIME, Axis("answers/s"), {"answers": found["goodput"]}))
    yield from picture("scale-memory", "Memory of the server over time", lines(
        "Memory of all processes of the server", TIME, Axis("MiB"), {"memory": found["memory"]}))
    yield from picture("scale-sessions", "Sessions over time", lines(
        "Sessions of the server", TIME, Axis("sessions"), {"sessions": found["sessions_open"]}))
    yield from table("tenant | weight | device time by weight | measured device time", *(
        f"{name} | {weight * 10:g} | {weight:.1%} | {found['shares'][name]:.1%}"
        for name, weight in found["weights"].items()))
    yield from ["Processor time of the gateway for one connection, on the same server before the load:", ""]
    yield from table("connection | ms", *(f"{how} | {ms:.2f}" for how, ms in found["admission_ms"].items()))


def cluster(found: Found) -> Iterator[str]:
    """Write what the simulation of clusters has shown."""
    yield from ["## Clusters of 10, 100 and 1,000 servers, simulated", "", f"Seed {found['seed']}.", ""]
    queues = found["queueing"]
    yield from table(
        "servers | load | requests | p50 s | p90 s | p99 s | most sessions on a server over the mean",
        *(f"{each['servers']:,} | {each['load']:g} | {each['requests']:,} | "
          f"{cells(each['waits_s'], '.3f')} | {each['most']:.2f}" for each in queues))
    yield from picture("scale-waits", "99th percentile of waits by load", lines(
        "How long requests wait: 99th percentile", Axis("load"), Axis("seconds"),
        {f"{servers:,} servers": [(each["load"], each["waits_s"][2]) for each in queues if each["servers"] == servers]
         for servers in dict.fromkeys(each["servers"] for each in queues)}))
    yield from ["A tenth of the servers fails at 60 s, at a load of 0.7:", ""]
    yield from table(
        "failure | servers | sessions moved | p50 s | p99 s",
        *(f"{each['what']} | {each['servers']:,} | {each['interrupted']:,} | "
          f"{cells(each['interrupted_s'], '.2f')}" for each in found["failing"]))
    for what, name in (("processes that are killed", "killed"), ("machines that vanish", "vanishing")):
        failing = [each for each in found["failing"] if each["what"] == what]
        yield from picture(f"scale-{name}", f"Answers over time, with {what}", lines(
            f"Answers per second and server; a tenth: {what}", TIME, Axis("answers/s"),
            {f"{each['servers']:,} servers": each["answered"] for each in failing}))
    placing = found["placing"]
    schedulers = list(placing[0]["schedulers_s"])
    yield from ["Processor time of placing work:", ""]
    yield from table(
        " | ".join(["servers | the directory's choice, ms", *(f"{name}, s" for name in schedulers)]),
        *(f"{each['servers']:,} | {each['choosing_s'] * 1e3:.3f} | "
          f"{cells(each['schedulers_s'].values(), '.2f')}" for each in placing))
    yield from picture("scale-placing", "Processor time of placing work by number of servers", lines(
        "Processor time of placing work", Axis("servers", is_log=True), Axis("seconds", is_log=True),
        {"directory": [(each["servers"], each["choosing_s"]) for each in placing],
         **{name: [(each["servers"], each["schedulers_s"][name]) for each in placing] for name in schedulers}}))


PARTS = {"clients": clients, "cluster": cluster}

if __name__ == "__main__":
    main()
