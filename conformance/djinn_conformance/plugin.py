"""The pytest plugin: ``--djinn-plugin``, test ids that name plugin and law, and a summary table.

It is loaded in every run of pytest where djinn-torch is installed, so it imports nothing heavy before a suite is
collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from djinn_conformance.subjects import Subject

_PACKAGE = Path(__file__).parent
_SECONDS = 10
"""Of the tests that run on a server, every tenth is also run in this process."""
_SUBJECTS: pytest.StashKey[list[Subject]] = pytest.StashKey()
_PROPERTY = "djinn_law"
_IGNORED_WARNINGS = (
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:An output with one or more elements was resized:UserWarning",
    "ignore:.*degrees of freedom is <= 0:UserWarning",
)
"""PyTorch's warnings on calls that are made deliberately. Sessions are tested with every available call, so these
warnings are ignored.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("djinn", "conformance of djinn plugins")
    group.addoption(
        "--djinn-report",
        metavar="PATH",
        help="Append to this file how many samples were equal, as lines of JSON.",
    )
    group.addoption(
        "--djinn-in-process",
        action="store_true",
        help="Test sessions in this process only, where no guard stands. Without it, they are tested on a guarded "
        "djinn serve in another process, and a sample of them in this one.",
    )
    group.addoption(
        "--djinn-plugin",
        metavar="NAME",
        help="Test this plugin: the name of its entry point, of an object that it registers, or kind:name. "
        "Without it, all installed plugins are tested. Use with --pyargs djinn_conformance.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse an unknown plugin before collection, and set the file for counts."""
    from djinn_conformance.tally import record_to

    record_to(config.getoption("--djinn-report"))
    if config.getoption("--djinn-plugin") is not None:
        _subjects(config)


def _subjects(config: pytest.Config) -> list[Subject]:
    if _SUBJECTS not in config.stash:
        try:
            from djinn_conformance.laws import ProfileError, active_profile
        except ImportError as error:
            raise pytest.UsageError(f"The conformance suites need Hypothesis ({error}). "
                                    "Install it with: pip install 'djinn-torch[test]'") from error
        from djinn.errors import DjinnError
        from djinn_conformance.subjects import SelectionError

        try:
            active_profile()
            config.stash[_SUBJECTS] = _select(config.getoption("--djinn-plugin"),
                                              served=not config.getoption("--djinn-in-process"))
        except (ProfileError, SelectionError, DjinnError) as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_SUBJECTS]


def _select(name: str | None, *, served: bool) -> list[Subject]:
    """Choose plugins' objects and the sessions in which they take part.

    A plugin that cannot change the behaviour of operators is tested in a session only if ``session:NAME`` is requested,
    or if everything is tested thoroughly.
    """
    from djinn_conformance.compositions import COMPOSED, COMPUTING, composed
    from djinn_conformance.laws import is_thorough
    from djinn_conformance.specs import SESSION
    from djinn_conformance.subjects import installed_plugins, select

    kind, _, last = (name or "").rpartition(":")
    if kind == SESSION:
        return composed(select(last, *installed_plugins()), COMPOSED, served=served)
    chosen = select(name, *installed_plugins())
    if kind:
        return chosen
    return [*chosen, *composed(chosen, COMPOSED if name is None and is_thorough() else COMPUTING, served=served)]


def _kind_of(path: Path) -> str | None:
    """Name the kind that a suite's file belongs to; the rest of the file's name distinguishes suites of one kind."""
    is_suite = path.parent == _PACKAGE and path.suffix == ".py" and path.name.startswith("test_")
    return path.stem.split("_")[1] if is_suite else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore suites without a subject."""
    kind = _kind_of(collection_path)
    if kind is None or kind in {subject.kind for subject in _subjects(config)}:
        return None
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of a suite for every chosen object of its kind."""
    kind = _kind_of(Path(metafunc.module.__file__ or ""))
    if kind is None or "subject" not in metafunc.fixturenames:
        return
    from djinn_conformance.capabilities import missing
    from djinn_conformance.laws import law_of
    from djinn_conformance.specs import SESSION, law_named

    law = law_of(metafunc.function)
    chosen = [subject for subject in _subjects(metafunc.config)
              if subject.kind == kind and not (kind == SESSION and law and missing(law_named(law), subject))]
    metafunc.parametrize("subject", chosen, ids=[f"{subject}-{law}" for subject in chosen], indirect=True,
                         scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check that tests and laws match, and remember the law of each test."""
    _sample_seconds(config, items)
    kinds: set[str] = set()
    for item in items:
        kind = _kind_of(item.path)
        if kind is None or not isinstance(item, pytest.Function):
            continue
        from djinn_conformance.laws import law_of
        from djinn_conformance.specs import SESSION

        kinds.add(kind)
        for warning in ("ignore",) if kind == SESSION else _IGNORED_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))
        subject = item.callspec.params["subject"] if hasattr(item, "callspec") else None
        item.user_properties.append((_PROPERTY, (str(subject), kind, law_of(item.function) or "")))
    if kinds:
        _check_correspondence(kinds)


def _sample_seconds(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a sample of the tests that repeat in this process what others do on a server."""
    if config.getoption("--djinn-in-process"):
        return
    dropped: list[pytest.Item] = []
    seen: Counter[str] = Counter()
    for item in items:
        if isinstance(item, pytest.Function) and _is_sampled(item):
            seen[item.originalname] += 1
            if seen[item.originalname] % _SECONDS != 1:
                dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


def _is_sampled(item: pytest.Function) -> bool:
    """Whether a test is one of many for a session that repeats another."""
    if _kind_of(item.path) != "session" or len(item.callspec.params) == 1:
        return False
    from djinn_conformance.compositions import is_second
    from djinn_conformance.laws import is_thorough

    return not is_thorough() and is_second(_subject_of(item))


def _subject_of(item: pytest.Function) -> Subject:
    found: Subject = item.callspec.params["subject"]  # type: ignore[assignment]  # set by `pytest_generate_tests`
    return found


def _check_correspondence(kinds: Iterable[str]) -> None:
    from djinn_conformance import specs
    from djinn_conformance.laws import laws_by_test, mismatches

    suites = {kind: _suites(kind) for kind in specs.suites()}
    faults = [fault for kind in sorted(kinds)
              for fault in mismatches(specs.kind_spec(kind), laws_by_test(*suites[kind]))]
    faults += [f"the kind {kind} has laws and no suite test_{kind}.py" for kind, found in suites.items() if not found]
    if faults:
        raise pytest.UsageError("Laws and tests do not correspond: " + "; ".join(faults) + ".")


def _suites(kind: str) -> list[str]:
    """Name the modules of a kind's suite."""
    return sorted(f"{_PACKAGE.name}.{path.stem}" for path in _PACKAGE.glob("test_*.py") if _kind_of(path) == kind)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the law with the failure of its test."""
    report = yield
    found = dict(item.user_properties).get(_PROPERTY)
    if found is not None and report.failed and isinstance(found, tuple) and found[2]:
        from djinn_conformance.specs import law_named

        law = law_named(found[2])
        report.sections.append(("law", f"{law.id}: {law.statement}\nsource: {law.source}"))
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Report success if the named plugin registers nothing that has laws, so that there was nothing to run.

    A worker of pytest-xdist also sends its counts to the process that prints them.
    """
    if hasattr(session.config, "workeroutput"):
        from djinn_conformance.tally import totals

        session.config.workeroutput[_PROPERTY] = [(*key, dict(counted)) for key, counted in totals.items()]
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _has_no_laws(session.config):
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a pytest-xdist worker."""
    from djinn_conformance.tally import totals

    for suite, direction, session, counted in getattr(node, "workeroutput", {}).get(_PROPERTY, ()):
        totals.setdefault((suite, direction, session), Counter()).update(counted)


def _has_no_laws(config: pytest.Config) -> bool:
    return config.getoption("--djinn-plugin") is not None and not config.stash.get(_SUBJECTS, [])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which laws each plugin keeps."""
    outcomes: dict[tuple[str, str], dict[str, set[str]]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            subject, kind, law = dict(getattr(report, "user_properties", ())).get(_PROPERTY, ("", "", ""))
            if subject:
                outcomes.setdefault((kind, subject), {}).setdefault(law, set()).add(outcome)
    if _has_no_laws(terminalreporter.config):
        terminalreporter.section("djinn conformance")
        terminalreporter.line(f"{terminalreporter.config.getoption('--djinn-plugin')} registers nothing that has laws.")
    if not outcomes:
        return
    terminalreporter.section("djinn conformance")
    width = max(len(subject) for _, subject in outcomes)
    for (kind, subject), laws in sorted(outcomes.items()):
        broken = [law for law, seen in laws.items() if seen & {"failed", "error"}]
        kept = sum("passed" in seen and law not in broken for law, seen in laws.items())
        left_out = len(laws) - kept - len(broken)
        line = f"{kind:<12} {subject:<{width}}  {kept:>3} laws kept  {len(broken):>3} broken"
        line += f"  {left_out:>3} not applicable" if left_out else ""
        terminalreporter.line(f"{line}  {', '.join(broken)}".rstrip(), red=bool(broken), green=not broken)
    from djinn_conformance.tally import totals

    for (suite, direction, session), count in totals.items():
        terminalreporter.line(f"{suite} {direction} {session}: {count['equal']} of {count['total']} samples equal, "
                              f"{count['different']} different as expected")
    for report in terminalreporter.stats.get("passed", ()):
        said = dict(getattr(report, "user_properties", ())).get("djinn_said")
        if said:
            terminalreporter.line(f"{report.nodeid.rpartition('::')[2]}: {said}")
