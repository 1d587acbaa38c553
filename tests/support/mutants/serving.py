"""Faults of a server: lost devices, who is charged for a device's time, where CUDA starts, named sessions."""

from __future__ import annotations

from support.mutants.planting import mutant

_LOST, _CHARGED, _BOUNDED = "server.lost_device_ends_worker", "server.device_time_charged", "server.programs_bounded"
_PAUSED, _LINE, _SLOT = (
    "server.turns_between_steps", "djinn_plugins.server.run_queue:RunQueue.",
    "djinn_plugins.server.session_slot:SessionSlot.")
_CHECK, _LOOK = "djinn_plugins.server.loss:DeviceLoss.check", "djinn_plugins.server.run_queue:RunQueue.look"
_TOLD = ("executor/test_device_loss_parts.py::"
         "test_the_session_that_sees_it_first_learns_why_others_lose_their_connection_and_the_process_ends")
_LATER = "executor/test_device_loss_parts.py::test_a_session_that_sees_it_later_is_not_blamed"
_CLOCK = "server/test_device_clock.py::"
_COMPUTED = f"{_CLOCK}test_sessions_are_charged_for_what_the_device_computes"
_GIVES_WAY = (
    "server/test_pausing.py::test_a_program_gives_a_recalled_turn_back_between_two_steps_and_goes_on_with_the_next_one")
_CANCELLED = "server/test_pausing.py::test_a_program_that_is_cancelled_while_it_pauses_ends_without_a_turn"
_BITS = ("../conformance/djinn_conformance/test_executor_pauses.py::"
         "test_pauses_between_steps[djinn-executor-cpu:cpu@cpu-executor.pauses_between_steps]")
_NAMED = "djinn_plugins.server.named_sessions:"
_RETURN = ("sessions/test_named_session_parts.py::"
           "test_the_next_client_finds_the_same_memory_and_no_other_has_it_open_meanwhile")

MUTANTS = (
    # A device that is lost.
    mutant("loss-overlooked", _LOST, "djinn_plugins.server.loss:DeviceLoss._look", "self._reason = self._ask()",
           "self._reason = ''", within=_TOLD),
    mutant("others-get-the-failure", _LOST, _CHECK, "end_others(others)", "end_others(error)", within=_TOLD),
    mutant("others-wait-for-ever", _LOST, _CHECK, "end_others(others)", "pass", within=_TOLD),
    mutant("worker-stays", _LOST, _CHECK, "if self._leave is not None:", "if False:", within=_TOLD),
    mutant("all-are-blamed", _LOST, _CHECK, "if self._blamed is not session:", "if False:", within=_LATER),
    mutant("the-last-one-is-blamed", _LOST, "djinn_plugins.server.loss:DeviceLoss._look", "if not self._reason:",
           "if True:",
           within=_LATER),
    mutant("lack-of-memory-taken-for-a-loss", _LOST, "djinn_plugins.executor.cuda.executor:reason_of_loss",
           "if is_out_of_memory(error) else", "if False else",
           within="executor/test_device_loss.py::test_a_lack_of_memory_is_no_loss"),
    # The device's time.
    mutant("submitting-counted", _CHARGED, _LOOK, "span.owner, device_s, time", "span.owner, span.host_s, time",
           within=_COMPUTED),
    mutant("sessions-not-charged", _CHARGED, _LOOK, "self._charge(span.owner, device_s - span.host_s)", "pass",
           within=_COMPUTED),
    mutant("another-session-charged", _CHARGED, _LOOK, "self._charge(span.owner, ",
           "self._charge((self.clock.oldest or span).owner, ", within=_COMPUTED),
    mutant("charged-before-it-is-computed", _CHARGED, "djinn_plugins.server.device_clock:DeviceClock.finished",
           "while self._spans and self._spans[0].last.query():", "while self._spans:", within=_COMPUTED),
    # What runs for too long.
    mutant("nothing-runs-once-it-is-submitted", _BOUNDED, "djinn_plugins.server.run_queue:RunQueue._show",
           "span = None if self.clock is None else self.clock.oldest", "span = None",
           within=f"{_CLOCK}test_the_board_shows_what_the_device_computes_until_it_has_finished"),
    mutant("time-since-it-was-submitted", _BOUNDED, "djinn_plugins.server.device_clock:DeviceClock.finished",
           "self._spans[0].since_ns = time.monotonic_ns()", "pass",
           within=f"{_CLOCK}test_a_program_runs_from_when_the_one_before_has_finished"),
    # Programs that give way between two steps.
    mutant("turn-kept-to-the-end-of-the-program", _PAUSED, f"{_SLOT}ask_to_pause",
           "self.breaks.append(self._request)", "pass", within=_GIVES_WAY),
    mutant("another-program-within-a-paused-one", _PAUSED, f"{_LINE}_let_next", "self.paused or min(", "min(",
           within=_GIVES_WAY),
    mutant("pause-taken-for-running-time", _PAUSED, f"{_LINE}_resume", "place.began_s = now - place.counted_s", "pass",
           within=_GIVES_WAY),
    mutant("paused-program-cannot-be-cancelled", _PAUSED, f"{_SLOT}give_up", "self._line.leave(self)", "pass",
           within=_CANCELLED),
    mutant("cancelled-program-goes-on-after-its-pause", _PAUSED, f"{_SLOT}give_up", "self.breaks += self.stop[:1]",
           "pass", within=_CANCELLED),
    mutant("next-program-is-cancelled-too", _PAUSED, f"{_LINE}enter", "place.breaks.clear()", "pass",
           within=_CANCELLED),
    mutant("another-program-beside-a-cancelled-one", _PAUSED, f"{_LINE}leave", "self._resume(place, time.monotonic())",
           "self.paused = None", within=_CANCELLED),
    mutant("waits-for-turns-that-nobody-gives", _PAUSED, f"{_LINE}close", "self.leave(place)",
           "kind.waiting.remove(place)",
           within="server/test_pausing.py::test_a_program_that_pauses_when_the_server_ends_goes_on"),
    mutant("others-work-charged-to-a-paused-program", _PAUSED, f"{_SLOT}_pause", "self._mark_begin()", "pass",
           within=f"{_CLOCK}test_what_others_compute_while_a_program_pauses_is_not_charged"),
    mutant("submitted-far-ahead-of-the-device", _PAUSED, "djinn_plugins.server.backlog:Backlog._keep_up",
           "self._marks[1][0].synchronize()", "break",
           within=f"{_CLOCK}test_a_program_is_submitted_as_little_ahead_of_the_device_as_keeps_it_busy[0.05-0.15]"),
    mutant("pauses-within-a-step", _PAUSED, "djinn_plugins.executor.torch.codegen:straight_line",
           '" stop and halt(stop)", line,',
           'f" {line}" if line else "", "stop and halt(stop)",', within=_BITS),
    mutant("pause-ends-the-program", _PAUSED, "djinn_plugins.executor.pauses:reason_to_stop",
           "if not isinstance(found, Pause)), None)", "), None)", within=_BITS),
    mutant("random-numbers-not-those-of-before-the-pause", _PAUSED, "djinn_plugins.executor.pauses:reason_to_stop",
           "found.wait()", "found.wait() or __import__('torch').rand(1)", within=_BITS),
    # What is done again after the end of a worker.
    mutant("repeated-work-counts-against-its-session", "server.repeats_shared",
           "djinn_plugins.server.run_queue:RunQueue._counted_s", "+ shared_s / max(1, self.busy)", "+ shared_s",
           within="server/test_run_queue.py::"
                  "test_what_a_session_repeats_after_its_worker_has_died_pushes_it_behind_no_other"),
    mutant("work-without-answers-is-always-shared", "server.repeats_shared",
           "djinn_plugins.server.run_queue:RunQueue._counted_s", "place.beginning_s -= shared_s", "pass",
           within="server/test_run_queue.py::test_a_session_that_asks_for_no_values_gets_no_more_in_the_long_run"),
    # Processes that fork.
    mutant("driver-started-where-workers-are-forked", "server.forks_without_device",
           "djinn_plugins.executor.cuda.visible:count", "if is_unknown and", "if False and",
           within="executor/test_cuda_devices.py::test_where_nothing_else_counts_another_process_asks_the_driver"),
    # Named sessions.
    mutant("kept-values-come-back-as-copies", "server.named_values_return", f"{_NAMED}moved",
           "target.values.put(handle, value)", "target.values.put(handle, value.clone())", within=_RETURN),
    mutant("open-for-two-clients", "server.named_values_return", f"{_NAMED}NamedSessions.claim",
           "holder is not claimant", "False", within=_RETURN),
    mutant("lease-never-over", "server.named_sessions_end", f"{_NAMED}NamedSessions.expire",
           "named.left_at + named.lease_s <= now", "False",
           within="sessions/test_named_session_parts.py::test_a_session_ends_with_its_lease_which_the_server_bounds"),
    mutant("kept-values-not-counted", "server.named_values_counted", f"{_NAMED}NamedSessions.left",
           "self._allowances.change_handles(0, len(named.handles), checks=False)", "pass",
           within="sessions/test_named_session_parts.py::test_values_count_while_no_client_has_them_and_so_do_names"),
    mutant("session-begun-on-another-server", "server.named_on_cluster",
           "djinn_plugins.cluster.directory.naming:NamedPlaces.place_of", "return holder", "return None",
           within="cluster/test_named_clusters.py::"
                  "test_a_session_begins_nowhere_else_as_long_as_its_server_may_come_back"),
    mutant("session-forgotten-with-its-server", "server.named_on_cluster",
           "djinn_plugins.cluster.directory.naming:NamedPlaces.left",
           "self._held.get(address, {}).items()", "()",
           within="cluster/test_named_clusters.py::"
                  "test_a_session_begins_nowhere_else_as_long_as_its_server_may_come_back"),
    mutant("older-session-of-a-name", "server.named_once_on_cluster",
           "djinn_plugins.cluster.directory.naming:NamedPlaces._newest",
           "max(", "min(",
           within="cluster/test_named_clusters.py::"
                  "test_the_session_that_began_later_has_the_name_in_whichever_order_servers_report"),
    mutant("tenants-share-a-worker", "server.named_sessions_private", "djinn_plugins.server.posts:WorkerPosts.find",
           "self._posts.get((tenant.name, wanted))", "next(iter(self._posts.values()), None)",
           "and post.tenant.key == tenant.key", "",
           within="sessions/test_named_sessions.py::test_no_other_tenant_sees_or_opens_a_session"),
)
"""``within`` names the test that is to notice it, beneath the folder `tests`."""
