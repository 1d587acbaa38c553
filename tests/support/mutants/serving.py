"""Faults of a server: what it does about a lost device, whom it charges for a device's time, and where CUDA starts."""

from __future__ import annotations

from support.mutants.planting import mutant

_LOST, _CHARGED, _BOUNDED = "server.lost_device_ends_worker", "server.device_time_charged", "server.programs_bounded"
_CHECK, _LOOK = "djinn_server.loss:DeviceLoss.check", "djinn_server.run_queue:RunQueue.look"
_TOLD = ("unit/test_device_loss.py::"
         "test_the_session_that_sees_it_first_learns_why_others_lose_their_connection_and_the_process_ends")
_LATER = "unit/test_device_loss.py::test_a_session_that_sees_it_later_is_not_blamed"
_CLOCK = "unit/test_device_clock.py::"
_COMPUTED = f"{_CLOCK}test_sessions_are_charged_for_what_the_device_computes"

MUTANTS = (
    # A device that is lost.
    mutant("loss-overlooked", _LOST, "djinn_server.loss:DeviceLoss._look", "self._reason = self._ask()",
           "self._reason = ''", within=_TOLD),
    mutant("others-get-the-failure", _LOST, _CHECK, "end_others(others)", "end_others(error)", within=_TOLD),
    mutant("others-wait-for-ever", _LOST, _CHECK, "end_others(others)", "pass", within=_TOLD),
    mutant("worker-stays", _LOST, _CHECK, "if self._leave is not None:", "if False:", within=_TOLD),
    mutant("all-are-blamed", _LOST, _CHECK, "if self._blamed is not session:", "if False:", within=_LATER),
    mutant("the-last-one-is-blamed", _LOST, "djinn_server.loss:DeviceLoss._look", "if not self._reason:", "if True:",
           within=_LATER),
    mutant("lack-of-memory-taken-for-a-loss", _LOST, "djinn_executor_cuda.executor:reason_of_loss",
           "if is_out_of_memory(error) else", "if False else",
           within="integration/test_device_loss.py::test_a_lack_of_memory_is_no_loss"),
    # The device's time.
    mutant("submitting-counted", _CHARGED, _LOOK, "span.owner, device_s, time", "span.owner, span.host_s, time",
           within=_COMPUTED),
    mutant("sessions-not-charged", _CHARGED, _LOOK, "self._charge(span.owner, device_s - span.host_s)", "pass",
           within=_COMPUTED),
    mutant("another-session-charged", _CHARGED, _LOOK, "self._charge(span.owner, ",
           "self._charge((self.clock.oldest or span).owner, ", within=_COMPUTED),
    mutant("charged-before-it-is-computed", _CHARGED, "djinn_server.device_clock:DeviceClock.finished",
           "while self._spans and self._spans[0].last.query():", "while self._spans:", within=_COMPUTED),
    # What runs for too long.
    mutant("nothing-runs-once-it-is-submitted", _BOUNDED, "djinn_server.run_queue:RunQueue._show",
           "span = None if self.clock is None else self.clock.oldest", "span = None",
           within=f"{_CLOCK}test_the_board_shows_what_the_device_computes_until_it_has_finished"),
    mutant("time-since-it-was-submitted", _BOUNDED, "djinn_server.device_clock:DeviceClock.finished",
           "self._spans[0].since_ns = time.monotonic_ns()", "pass",
           within=f"{_CLOCK}test_a_program_runs_from_when_the_one_before_has_finished"),
    # Processes that fork.
    mutant("driver-started-where-workers-are-forked", "server.forks_without_device",
           "djinn_executor_cuda.visible:count", "if is_unknown and", "if False and",
           within="unit/test_cuda_devices.py::test_where_nothing_else_counts_another_process_asks_the_driver"),
)
"""``within`` names the test that is to notice it, beneath the folder `tests`."""
