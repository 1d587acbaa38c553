"""Everything that is done with this repository. ``nox`` alone runs lint, docs, types and tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
# Plain pip, never uv: only pip finds the CPU build of the pinned torch where that is kept beside the index.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["all"]

ROOT = Path(__file__).parent
THIRD_PARTY = ("tests/third_party/djinn-scheduler-reverse", "tests/third_party/djinn-pattern-lowrank")
IMPORT_ROOTS = (".", "plugins", "conformance")
# The same examples every time, so that a red run is somebody's doing. HYPOTHESIS_PROFILE=nightly looks further.
# Hundreds of processes start, and none should compile what another one has compiled.
PROFILE = {"HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "ci"), "PYTHONDONTWRITEBYTECODE": ""}


def _install(session: nox.Session, *packages: str) -> None:
    # What is imported is compiled then; most of what is installed never is.
    session.install("--no-compile", "-c", "constraints.txt", *packages)


def _output(session: nox.Session, name: str) -> Path:
    """Name a file for what a session leaves, or reads.

    It is not in `session.create_tmp()`, which makes the checkout the place of all temporary files: servers' workers
    read modules from there, so no sandbox could hide what tests put there, and paths of sockets would be too long.
    """
    return session.cache_dir.absolute() / name


@nox.session(name="all", venv_backend="none")
def everything(session: nox.Session) -> None:
    """Run lint, docs, types and the tests at the same time. What lint, docs and types print is shown when each ends."""
    run_nox = (sys.executable, "-m", "nox")
    # Installing waits for the network, and collecting tests is the work of one processor.
    with subprocess.Popen(  # noqa: S603  # this interpreter and this file
            [*run_nox, "--parallel", "2", "--sessions", "lint", "docs", "types"], stdin=subprocess.DEVNULL) as checks:
        try:
            session.run(*run_nox, "--sessions", "tests")
        finally:
            if checks.wait():
                session.error("Lint, docs or types failed. What they printed is above.")


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Check style, banned imports and who imports whom."""
    _install(session, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    # The packages are read, not imported; so nothing else needs to be installed.
    session.run("lint-imports", "--config", "tests/architecture/imports.toml",
                env={"PYTHONPATH": ":".join(str(ROOT / root) for root in IMPORT_ROOTS)})


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Build the documentation's site in build/docs; warnings are errors."""
    _install(session, "furo", "myst-nb", "sphinx", "sphinx-autoapi", "sphinxcontrib-mermaid")
    session.run("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", *session.posargs, "docs", "build/docs")
    session.log("Open %s.", ROOT / "build" / "docs" / "index.html")


@nox.session(allow_parallel=True)
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    _install(session, "-e", ".[dashboard,metrics,tls]", "hypothesis", "mypy", "nox", "pytest", "trustme",
             "types-networkx")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, those of third parties' plugins among them.

    Tests that measure time come last and by themselves; all others share the processors. With arguments for pytest
    (``-- tests/kernel -k config``), it runs once, in one process.
    """
    _install(session, "-e", ".[test]")
    # Built and installed as their users would have them, not editable.
    _install(session, "--no-deps", "--force-reinstall", *THIRD_PARTY)
    if session.posargs:
        session.run("pytest", *session.posargs, env=PROFILE)
        return
    # By file, since tests of one file share servers; in the order of `testpaths`. Ten processes, since
    # tests wait for servers, and one for each processor where there are more. One thread each.
    processes = str(max(10, os.cpu_count() or 1))
    parts = [["-p", "support.processes.forks", "--forks", processes]]
    if sys.platform != "linux":  # a process that has used a Mac's libraries must not fork
        parts = [["-n", processes, "--dist=loadfile", "--no-loadscope-reorder", "-m", "not alone"], ["-m", "alone"]]
    # Each part runs even if one has failed; then what failed is named in the last lines.
    reports = [_output(session, f"tests-{number}.xml") for number, _ in enumerate(parts)]
    for arguments, report in zip(parts, reports, strict=True):
        report.unlink(missing_ok=True)
        session.run("pytest", *arguments, "-o", "junit_family=xunit1", f"--junitxml={report}", success_codes=[0, 1],
                    env={**PROFILE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")})
    session.run("python", "tests/support/reports/failed_tests.py", *map(str, reports))


def _judge_everything(session: nox.Session, *arguments: str) -> Path:
    """Run all suites, thoroughly, from an empty directory; return the file with the counts of samples."""
    counts = _output(session, "counts.jsonl")
    counts.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run("pytest", "--pyargs", "djinn_conformance", "-q", "--tb=short", f"--djinn-report={counts}",
                    *arguments, env={"HYPOTHESIS_PROFILE": "full", "OMP_NUM_THREADS": "1"})
    return counts


@nox.session
def conformance(session: nox.Session) -> None:
    """Test the built and installed project's plugins, and sessions of them, against all laws: under 40 minutes."""
    _install(session, ".[test]")
    _judge_everything(session, *session.posargs)


def _conformance_with(version: str) -> None:
    """Define the session that tests with one release of PyTorch and publishes what it counted."""

    @nox.session(name=f"conformance-{version}")
    def with_release(session: nox.Session) -> None:
        """Test against all laws with one release of PyTorch, and write docs/conformance.md."""
        others = [line for line in Path("constraints.txt").read_text().splitlines() if not line.startswith("torch")]
        constraints = _output(session, "constraints.txt")
        constraints.write_text("\n".join([*others, f"torch=={version}"]))
        session.install("-c", str(constraints), ".[test]")
        counts = _judge_everything(session, *session.posargs)
        session.run("python", "-m", "djinn_conformance.report", str(counts), "--results", "docs/results",
                    "--page", "docs/conformance.md")


# Any release will do: nox -s conformance-2.13.0. Named here are those whose results are published.
for _version in dict.fromkeys(["2.13.0", "2.15.0", *re.findall(r"conformance-(\d+\.\d+\.\d+)", " ".join(sys.argv))]):
    _conformance_with(_version)


@nox.session
def libraries(session: nox.Session) -> None:
    """Run scripts of other libraries with ``djinn run``, compare with the CPU, and write docs/libraries.md.

    With arguments for pytest (``-- -k lightning``), only what they select is run, and nothing is written.
    """
    _install(session, "-e", ".[test]", "accelerate", "captum", "datasets", "diffusers", "einops", "gpytorch", "ipython",
             "lightning", "peft", "pillow", "pyro-ppl", "torch-geometric", "torchao", "torchdiffeq", "torchmetrics",
             "trl")
    results = _output(session, "libraries.jsonl")
    results.unlink(missing_ok=True)
    session.run("pytest", "tests/libraries", "-o", "python_files=check_*.py", "--timeout=3600", "-n", "2",
                *session.posargs, env={**PROFILE, "DJINN_LIBRARY_RESULTS": str(results)})
    if not session.posargs:
        session.run("python", "tests/support/reports/libraries.py", str(results))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure ratios to rivals of the same run, write docs/performance.md, and fail where one is not good enough.

    It also measures and writes the tables of docs/documents.md. With arguments for pytest (``-- -k recording``), only
    what they select is measured and judged, and nothing is written. ``-- --accept`` publishes figures that are worse
    than those published before.
    """
    arguments = [argument for argument in session.posargs if argument != "--accept"]
    judging = [*(["--partial"] if arguments else []), *(["--accept"] if "--accept" in session.posargs else [])]
    _install(session, "-e", ".[test]")
    measured = _output(session, "benchmarks.json")
    measured.unlink(missing_ok=True)
    session.run("pytest", "tests/benchmarks", "-o", "python_files=bench_*.py", "--benchmark-enable", "-s",
                "--benchmark-columns=median,rounds", f"--benchmark-json={measured}", "--timeout=1800", *arguments,
                env={"OMP_NUM_THREADS": "1", "PYTHONPATH": "tests"})
    session.run("python", "-m", "support.reports.documents", str(measured), *judging[:bool(arguments)],
                env={"PYTHONPATH": "tests"})
    session.run("python", "-m", "support.reports.performance", str(measured), *judging, env={"PYTHONPATH": "tests"})


@nox.session
def chaos(session: nox.Session) -> None:
    """Break what can break, again and again, and write docs/reliability.md: about an hour.

    ``-- fuzz`` does only what tests/chaos/chaos_fuzz.py does. ``-- operators`` goes on where it was interrupted.
    """
    _install(session, "-e", ".[test]")
    files = {name: f"tests/chaos/chaos_{name}.py" for name in session.posargs}
    named = [file for file in files.values() if Path(file).exists()]
    others = [name for name in session.posargs if files[name] not in named]
    found = _output(session, "found.jsonl")
    found.unlink(missing_ok=True)
    session.run("pytest", *(named or ["tests/chaos"]), "-o", "python_files=chaos_*.py", "-s", "--timeout=3600", *others,
                env={**PROFILE, "DJINN_CHAOS_RESULTS": str(found), "DJINN_CHAOS_STATE": str(found.parent)})
    session.run("python", "-m", "support.reports.reliability", str(found), env={"PYTHONPATH": "tests"})


@nox.session
def soak(session: nox.Session) -> None:
    """Let clients come and go against one server for some minutes (``-- --minutes 60``); fail if it grows."""
    _install(session, "-e", ".[test]")
    session.run("python", "tests/chaos/soak.py", *session.posargs)


@nox.session
def scale(session: nox.Session) -> None:
    """Let 200 clients use one server for ten minutes, simulate clusters, and write docs/scale.md: 15 minutes.

    ``-- clients`` or ``-- cluster`` does one of the two; arguments after the name are passed on.
    """
    parts = {"clients": ("many_clients", "--kill"), "cluster": ("cluster_figures",)}
    chosen, *arguments = session.posargs or [""]
    _install(session, "-e", ".[test]")
    found = _output(session, "scale.jsonl")
    found.unlink(missing_ok=True)
    environment = {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    for name, (module, *usual) in parts.items():
        if chosen in ("", name):
            session.run("python", "-m", f"support.scale.{module}", str(found), *usual, *arguments, env=environment)
    session.run("python", "-m", "support.reports.scale", str(found), env=environment)


@nox.session
def foreign(session: nox.Session) -> None:
    """Run other projects' tests on a server and on the CPU, and write docs/foreign.md.

    ``-- pytorch --source CHECKOUT`` runs PyTorch's, ``-- transformers --source CHECKOUT`` those of transformers, and so
    for the other libraries; names of files or of families of models, and arguments of pytest after ``--``, choose some.
    """
    hugging_face = ("accelerate", "datasets", "diffusers", "parameterized", "peft", "pillow", "requests")
    needed = {"pytorch": ("numpy", "expecttest"), "accelerate": hugging_face, "diffusers": hugging_face,
              "lightning": ("lightning", "cloudpickle", "torchmetrics"), "peft": hugging_face,
              "torchao": ("parameterized", "torchao"),
              "torchmetrics": ("cachier", "monai", "nltk", "pandas", "permetrics", "pytorch-msssim", "scikit-image",
                               "scikit-learn", "sewar", "torchmetrics"),
              "transformers": (*hugging_face, "httpx")}
    whose, *others = session.posargs or [""]
    if whose not in needed:
        session.error(f"Say whose tests: nox -s foreign -- {'|'.join(needed)} --source CHECKOUT")
    _install(session, "-e", ".[test]", *needed[whose])
    runner = ["pytorch_tests"] if whose == "pytorch" else ["library_tests", whose]
    session.run("python", "-m", f"support.foreign.{runner[0]}", *runner[1:], *others,
                env={"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"})


@nox.session
def demo(session: nox.Session) -> None:
    """Install the project as its users do, and run the demo."""
    _install(session, ".[demo]")
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run("djinn", "demo", *session.posargs)
