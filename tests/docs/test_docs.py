"""The docs are true: what they show runs and prints what they say, links lead somewhere, nothing is left out."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import typer.main
from support.pages.sources import files_in
from support.processes.warm import WarmPython, clean_environment, run_pytest, run_python
from support.servers.serving import Serving

import djinn
from djinn.plugins import KINDS
from djinn.plugins.manager import Plugins
from djinn_conformance import specs
from djinn_plugins.cli.app import build

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = files_in(DOCS, ".md")
EVERYTHING = "\n".join(page.read_text() for page in PAGES)
HOW_TOS = {kind: DOCS / "plugins" / f"{kind}.md" for kind in KINDS}
PROTOCOLS = {kind: specs.kind_spec(kind).protocol for kind in KINDS}
ADDRESS = "tcp://127.0.0.1:7777"
"""Where the documents let the server listen; the tests' own listens on a free port instead."""
CHOSEN = "not test_session_ or (test_operations_equal and (indexing or joining))"
"""Of the laws of sessions, which some kinds have to keep, too, one for two families of operators: all take minutes."""
TIMEOUT_S = 280.0
IN_ITS_OWN = ("README.md", "tutorial.md")
"""Pages that run in an interpreter of their own, as they do for who reads them."""
MAX_WORDS = 100
"""Of a paragraph: a longer one is read twice."""
END = "<end of block>"
RUNNER = f"""
import json, sys
namespace = {{"__name__": "__main__"}}
for line, code in json.loads(sys.argv[2]):
    exec(compile("\\n" * line + code, sys.argv[1], "exec"), namespace)
    print({END!r}, flush=True)
"""
_BLOCK = re.compile(
    r"(?ms)(?:^<!-- (?P<marker>[^\n]*?) -->\n|^`(?P<file>[\w./-]+)`:\n\n)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@attrs.frozen
class Block:
    """A piece of a document between fences: its first line, what stands above it, and its text."""

    line: int
    language: str
    text: str
    marker: str
    file: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(text[: found.start("text")].count("\n"), found["language"], found["text"], found["marker"] or "",
                  found["file"] or "") for found in _BLOCK.finditer(text)]


def execute(page: Path, folder: Path, address: str = ADDRESS, **environment: str) -> dict[int, str]:
    """Run a page's program, block by block in one process; for each block's line, return what it prints."""
    program = [(block.line, block.text.replace(ADDRESS, address)) for block in blocks_of(page)
               if block.language == "python" and not block.file]
    arguments = [str(page.relative_to(ROOT)), json.dumps(program)]
    log = folder / "errors.log"
    if page.name in IN_ITS_OWN:
        with log.open("w") as errors:
            done = subprocess.run(
                [sys.executable, "-c", RUNNER, *arguments], cwd=folder, env=clean_environment(**environment),
                stdout=subprocess.PIPE, stderr=errors, text=True, timeout=TIMEOUT_S, check=False)
        status, said = done.returncode, done.stdout
    else:
        with WarmPython(RUNNER, arguments, environment=clean_environment(**environment), log=log, folder=folder,
                        has_djinn=True) as process:
            said, status = process.stdout.read(), process.wait(TIMEOUT_S)
    assert status == 0, log.read_text()
    # PyTorch's profiler writes a line when it starts and when it stops.
    warned = [line for line in log.read_text().splitlines() if not line.startswith("USDT:")]
    assert not warned, f"the program warns, and its reader would wonder:\n{warned}"
    *printed, rest = said.split(f"{END}\n")
    assert not rest
    return dict(zip([line for line, _ in program], printed, strict=True))


def run(page: Path, folder: Path, address: str = ADDRESS, **environment: str) -> None:
    """Run a page's program and hold what it prints against what the page says."""
    printed = execute(page, folder, address, **environment)
    checker, last = doctest.OutputChecker(), 0
    for block in blocks_of(page):
        if block.marker == "output":
            got = printed.pop(last)
            said = block.text.replace(ADDRESS, address)
            assert checker.check_output(said, got, doctest.ELLIPSIS), f"{page.name}:{last + 1} prints\n{got}"
        elif block.language == "python" and not block.file:
            last = block.line
    assert not any(printed.values()), f"{page.name} does not say that it prints {printed}"


@pytest.fixture
def server_address(tmp_path: Path) -> Iterator[str]:
    code = "from djinn_plugins.cli.app import main; main()"
    process = WarmPython(code, ["serve", "--device", "cpu", "--threads", "1"], environment=clean_environment(),
                         log=tmp_path / "server.log", has_djinn=True)
    try:
        with process.stdout:
            yield process.stdout.readline().strip().removeprefix("djinn serving ")
    finally:
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0, (tmp_path / "server.log").read_text()


def test_the_tutorial_prints_what_it_says(tmp_path: Path, server_address: str) -> None:
    page = DOCS / "tutorial.md"
    commands = [block.text for block in blocks_of(page) if block.marker == "server"]
    assert commands == [f"djinn serve --port {ADDRESS.rpartition(':')[2]}\n"]
    run(page, tmp_path, server_address)


def test_the_readme_runs(tmp_path: Path, server_address: str) -> None:
    loss, patterns = execute(ROOT / "README.md", tmp_path, server_address).values()
    assert float(loss) > 0
    assert ast.literal_eval(patterns) == {"attention": 1, "mlp": 1, "norm": 2}
    assert (tmp_path / "layer.html").stat().st_size > 10_000


def test_the_code_of_earlier_documents_runs_against_a_server(tmp_path: Path, server_address: str) -> None:
    run(DOCS / "earlier.md", tmp_path, server_address, DJINN_SERVER=server_address)


def test_the_differences_from_eager_are_those_that_the_page_names(tmp_path: Path) -> None:
    run(DOCS / "compatibility.md", tmp_path)


def test_what_the_page_of_pictures_writes_is_a_page(tmp_path: Path) -> None:
    run(DOCS / "pictures.md", tmp_path)
    assert (tmp_path / "model.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_what_the_page_of_patterns_prints_is_so(tmp_path: Path) -> None:
    run(DOCS / "patterns.md", tmp_path)


def test_what_the_page_of_plans_prints_is_so(tmp_path: Path) -> None:
    run(DOCS / "planning.md", tmp_path)
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_what_the_page_of_the_compiler_prints_is_so(tmp_path: Path) -> None:
    run(DOCS / "dynamo.md", tmp_path)


def test_what_the_page_of_recovery_prints_is_so(tmp_path: Path, server_address: str) -> None:
    run(DOCS / "recovery.md", tmp_path, server_address, DJINN_LOG_LEVEL="ERROR")


def test_what_the_page_of_event_loops_prints_is_so(tmp_path: Path, server_address: str) -> None:
    run(DOCS / "async.md", tmp_path, server_address, DJINN_LOG_LEVEL="ERROR")


def test_what_the_page_of_settings_prints_is_so(tmp_path: Path) -> None:
    run(DOCS / "plugins" / "settings.md", tmp_path)


def install(page: Path, folder: Path) -> str:
    """Write the plugin of a how-to page to a folder, installed as pip would, and return its name."""
    files = {block.file: block.text for block in blocks_of(page) if block.file}
    project: dict[str, Any] = tomllib.loads(files["pyproject.toml"])["project"]
    ((name, module),) = project["entry-points"]["djinn"].items()
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    for path, text in {
        **files,
        f"{metadata.name}/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n",
        f"{metadata.name}/entry_points.txt": f"[djinn]\n{name} = {module}\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return str(name)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def paths(site: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_a_kind_does_what_its_page_says(kind: str, tmp_path: Path, site: Path) -> None:
    page = HOW_TOS[kind]
    name = install(page, site)
    assert name.startswith(f"djinn-{kind}-")
    environment = dict(block.marker.removeprefix("environment: ").split("=", 1) for block in blocks_of(page)
                       if block.marker.startswith("environment: "))
    run(page, tmp_path, **environment, **paths(site))


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_a_kind_keeps_its_laws(kind: str, tmp_path: Path, site: Path) -> None:
    page = HOW_TOS[kind]
    name = install(page, site)
    (command,) = re.findall(r"(?m)^pytest (.*)$", page.read_text())
    assert command == f"--pyargs djinn_conformance --djinn-plugin={name}"
    empty = tmp_path / "empty"
    empty.mkdir()
    output = tmp_path / "output"
    status = run_pytest([*command.split(), "-k", CHOSEN], folder=empty, output=output, timeout_s=TIMEOUT_S,
                        environment=clean_environment(HYPOTHESIS_PROFILE="smoke", **paths(site)))
    assert status == 0, output.read_text()
    laws = len(tomllib.loads((ROOT / "specs" / "kinds" / f"{kind}.toml").read_text())["laws"])
    found = re.findall(rf"(?m)^{kind} +{name}:\S+ +(\d+) laws kept +0 broken(?: +(\d+) not applicable)?",
                       output.read_text())
    assert found, output.read_text()
    assert {int(kept) + int(idle or 0) for kept, idle in found} == {laws}, output.read_text()


def serve_command(kind: str) -> str:
    """Return how a page says that a server uses its example, unless its program starts that server; else nothing."""
    page = HOW_TOS[kind]
    _, _, section = page.read_text().partition("\n## Use it\n")
    programs = [block.text for block in blocks_of(page) if block.language == "python" and not block.file]
    found = re.search(r"(?m)(?:^|`)((?:[A-Z_]+=\S+ )*djinn serve\b[^`\n]*)", section)
    return "" if found is None or any('"serve"' in program for program in programs) else found[1]


SERVED = [kind for kind in KINDS if serve_command(kind)]


def test_servers_of_pages_are_found() -> None:
    assert {"executor", "guard", "memory", "transport"} <= set(SERVED)


@pytest.mark.parametrize("kind", SERVED)
def test_the_example_of_a_kind_is_served_as_its_page_says(kind: str, tmp_path: Path, site: Path) -> None:
    install(HOW_TOS[kind], site)
    words = serve_command(kind).split()
    variables = dict(word.split("=", 1) for word in words[: words.index("djinn")])
    arguments = [re.sub(r":\d+$", ":0", word) for word in words[words.index("serve") + 1 :]]
    program = ("import sys, djinn, torch; session = djinn.init(sys.argv[1]); print(session.backend.address); "
               "print((torch.ones(2, device=session.device) * 3).sum().item())")
    with Serving(tmp_path / "server.log", *arguments, **variables, **paths(site)) as server:
        done = run_python(program, server.address, path=site, has_djinn=True)
    assert done.stdout.split() == [server.address, "6.0"], done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_a_kind_names_its_hook_members_laws_and_check(kind: str) -> None:
    text = HOW_TOS[kind].read_text()
    module, _, name = PROTOCOLS[kind].rpartition(".")
    protocol = getattr(importlib.import_module(module), name)
    members = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
    members |= set(inspect.get_annotations(protocol))
    laws = tomllib.loads((ROOT / "specs" / "kinds" / f"{kind}.toml").read_text())["laws"]
    wanted = [f"djinn_register_{kind.rstrip('s')}", KINDS[kind].protocol.replace(":", "."), f"specs/kinds/{kind}.toml",
              *(law["id"] for law in laws)]
    assert [word for word in wanted if word not in text] == []
    assert [name for name in sorted(members) if not re.search(rf"`{name}\b", text)] == []
    named = set(re.findall(rf"`({kind}\.[a-z_]+)`", text))
    assert named == {law["id"] for law in laws}, "laws that do not exist are named"


def test_the_table_of_kinds_lists_every_object_of_djinn() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(.*\|([^|]*)\|$", (ROOT / "docs/plugins/index.md").read_text(), re.MULTILINE)
    listed = {kind: set(re.findall("`(.+?)`", names)) for kind, names in rows}
    plugins = Plugins.load()
    assert listed == {kind: {name for name, entries in plugins.registered(kind).items()
                             if any(entry.distribution.startswith("djinn-torch ") for entry in entries)}
                      for kind in KINDS}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "changes" / "README.md", *PAGES],
                         ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for found in _LINK.finditer(re.sub(r"(?ms)^```.*?^```$", "", page.read_text())):
        target, _, anchor = found["target"].partition("#")
        if target.startswith(("http://", "https://")):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or not path.is_relative_to(ROOT) or (anchor and anchor not in anchors_of(path)):
            broken.append(found["target"])
    assert not broken


def test_sections_that_specifications_name_exist() -> None:
    lost = []
    for path in (ROOT / "specs").rglob("*.toml"):
        for page, title in re.findall(r"docs/([\w/]+\.md), (?:section )?([A-Z][\w -]*)", path.read_text()):
            titles = re.findall(r"(?m)^#+ (.+)$|^\*\*(.+?)\.\*\*", (DOCS / page).read_text())
            lost += [] if any(title in each for each in titles) else [f"{path.name}: {page}, {title}"]
    assert not lost


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_page_is_on_the_map() -> None:
    index = (DOCS / "index.md").read_text() + (DOCS / "plugins" / "index.md").read_text().replace("](", "](plugins/")
    linked = {found["target"].partition("#")[0] for found in _LINK.finditer(index)}
    assert {str(page.relative_to(DOCS)) for page in PAGES} - linked <= {"index.md"}


def test_every_page_is_in_the_sidebar_of_the_site() -> None:
    listed = set(re.findall(r'"([\w/]+)"', (DOCS / "conf.py").read_text()))
    assert {page.stem for page in DOCS.glob("*.md")} - listed <= {"index"}


def test_no_page_names_a_place_of_one_machine() -> None:
    places = re.findall(r"(?<![\w.:/])/(?:home|root|work|tmp|usr|opt|Users)/\S*", EVERYTHING)
    assert not places


def test_every_public_name_is_described() -> None:
    described = set(re.findall(r"`djinn\.(\w+)", (DOCS / "api.md").read_text()))
    assert set(djinn.__all__) - described == set()
    assert {name for name in described if not hasattr(djinn, name)} == set(), "described, and does not exist"


def test_every_counter_is_described() -> None:
    djinn.init()
    try:
        counters = set(djinn.stats())
    finally:
        djinn.shutdown()
    _, _, section = (DOCS / "api.md").read_text().partition("## Counters")
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", section)) == counters


def setting_rows() -> Mapping[str, tuple[str, str]]:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (.*?) \| (.*?) \| .* \|$", (DOCS / "configuration.md").read_text())
    return {name: (default.strip("`"), variable.strip("`")) for name, default, variable in rows}


def test_every_setting_is_described_with_its_default_and_variable() -> None:
    expected = {}
    for name, declared in Plugins.load().declared.by_name.items():
        default = "" if isinstance(declared.default, attrs.Factory) else declared.default
        expected[name] = ("empty" if default == "" else str(default), declared.variable)
    assert setting_rows() == expected


def test_every_command_and_option_is_described() -> None:
    app, problems = build({"DJINN_PLUGINS": ""})
    assert not problems
    program = typer.main.get_group(app)
    text = (DOCS / "configuration.md").read_text()
    missing = []
    for name, command in program.commands.items():
        _, heading, section = text.partition(f"### djinn {name}\n")
        section = section.partition("\n#")[0]
        missing += [] if heading else [name]
        options = [option for parameter in command.params for option in parameter.opts]
        missing += [f"{name} {option}" for option in options if f"`{option}`" not in section]
    assert not missing
    assert "`djinn --version`" in text


@pytest.mark.parametrize("path", sorted([*(ROOT / "djinn/kinds").glob("*.py"),
                                         *(ROOT / "plugins/djinn_plugins/common/kinds").glob("*.py")]), ids=str)
def test_optional_abilities_are_in_the_page_of_their_kind(path: Path) -> None:
    abilities = [node for node in ast.parse(path.read_text()).body
                 if isinstance(node, ast.ClassDef) and node.name.startswith("Supports")]
    for ability in abilities:
        page = (ROOT / "docs/plugins" / f"{path.stem}.md").read_text()
        row = next((line for line in page.splitlines() if line.startswith(f"| `{ability.name}` |")), "")
        for member in ability.body:
            name = member.target.id if isinstance(member, ast.AnnAssign) else getattr(member, "name", "")
            assert re.search(rf"`{name}\b", row), f"{path.stem}.md does not describe {ability.name}.{name}"


def paragraphs_of(text: str) -> list[str]:
    """Every paragraph and every item of a list, without code, tables and headings."""
    prose = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->|^[|#].*?$", "\n", text)
    return [part for part in re.split(r"\n\s*\n|\n(?=- |\d+\. )", prose) if part.strip()]


@pytest.mark.parametrize("name", ["architecture", "models", "server"])
def test_a_long_page_begins_with_a_summary_and_has_short_paragraphs(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    summary = re.split(r"(?m)^(?:```|## )", text)[0]
    assert 3 <= len(re.findall(r"[.:](?=\s)", summary)) <= 15
    assert len(summary.split()) <= 180
    assert [part for part in paragraphs_of(text) if len(part.split()) > MAX_WORDS] == []
