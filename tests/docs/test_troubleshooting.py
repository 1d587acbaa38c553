"""Each symptom of the page "It does not work" is brought about by a test, and so is what helps."""

from __future__ import annotations

import re

import pytest
from support.pages.capabilities import ROOT, list_tests

TESTS = {
    "`[DJ301] Nobody answers": "transport/test_tcp_connection.py::test_nobody_answers",
    "`import djinn` raises `[DJ206]":
        "device/test_requirements.py::test_a_release_without_python_backends_is_refused_by_name_and_remedy",
    "`[DJ305] The server":
        "server/test_serve.py::test_other_machines_are_let_in_with_a_token_over_tls",
    "`djinn serve --host 0.0.0.0`":
        "server/test_serve.py::test_other_machines_are_not_let_in_without_a_token_and_encryption",
    "a setting has no effect":
        "cli/test_cli.py::test_the_doctor_has_colours_on_a_terminal_and_puts_the_remedy_below_the_problem",
    "the program computes in its own process":
        "replay/test_recovery.py::test_local_fallback_alone_is_enough_where_nobody_listens",
    "an exception of PyTorch at": "integration/test_errors.py::test_debug_mode_names_the_line_that_recorded_it",
    "slow, although": "watch/test_notices.py::test_round_trips_are_counted_by_line",
    "a model trains on the CPU": "run/test_run.py::test_a_script_computes_on_the_server_and_one_line_says_so",
    "the server ended a session": "server/test_oversight.py::test_the_operator_sees_sessions_and_ends_them",
    "a connection breaks": "transport/test_resumption.py::test_a_blackout_of_five_seconds_is_a_pause",
    "a server dies": "replay/test_recovery.py::test_a_server_that_is_killed_in_a_fetch_is_no_exception",
    "something else":
        "watch/test_client_metrics.py::test_a_component_is_switched_while_a_session_runs_and_costs_nothing_when_off",
}
"""By the beginning of a symptom."""
SYMPTOMS = re.findall(r"(?m)^\| (?!symptom )(\S.*?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text())


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_is_brought_about_by_a_test(symptom: str) -> None:
    (shown,) = {shown for begin, shown in TESTS.items() if symptom.startswith(begin)}
    file, _, test = shown.partition("::")
    assert test in list_tests(f"tests/{file}"), shown


def test_each_test_belongs_to_a_symptom() -> None:
    assert len(SYMPTOMS) == len(TESTS)
