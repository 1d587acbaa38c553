"""Faults of handing over: hazards, programs, the random generator, lifetimes, failures."""

from __future__ import annotations

from mutants.planting import mutant

_WRITES = "add_.Tensor mul_.Scalar copy_ zero_ add.Tensor view select.int transpose.int"
_DRAWS = "rand randn randperm normal_ uniform_"

MUTANTS = (
    # Hazards.
    mutant("read-after-write-forgotten", "session.slices_equal", "djinn.tape:needed_for",
           "            or not written.isdisjoint(reads)\n            or not written.isdisjoint(writes)\n", "",
           within=_WRITES),
    mutant("write-after-read-forgotten", "session.slices_equal", "djinn.tape:needed_for",
           "            or not read.isdisjoint(writes)\n", "", within=_WRITES),
    mutant("write-into-a-list-half-forgotten", "session.slices_equal", "djinn.tape:needed_for",
           "for index in signature.writes}", "for index in signature.writes[:1]}",
           within="_foreach_add_.Scalar _foreach_zero_ _foreach_neg_ view"),
    mutant("draws-not-ordered", "session.slices_equal", "djinn.tape:needed_for",
           "if signature.is_random:", "if False:", within=_DRAWS),
    mutant("alias-lost", "session.slices_equal", "djinn.recorder:Recorder._append",
           "slots[alias].storage if alias >= 0 else number", "number", within=_WRITES),
    mutant("alias-of-a-list-lost", "session.slices_equal", "djinn.recorder:Recorder.new_results",
           "slots[alias].storage if alias >= 0 else number", "number",
           within="split.Tensor unbind.int add_.Tensor zero_ mul_.Scalar"),
    mutant("write-not-noticed", "session.slices_equal", "djinn.binding:Planner._plan",
           "for position in ranges.get(name, range(0)))", "for position in ranges.get(name, range(0))[1:])",
           within=_WRITES),
    mutant("rest-of-a-slice-lost", "session.slices_equal", "djinn.tape:Tape.cut_slice",
           "self.nodes[:count] = [node for node, is_needed in zip(piece, needed, strict=True) if not is_needed]",
           "self.nodes[:count] = [node for node, is_needed in zip(piece, needed, strict=True) if not is_needed and node.outputs]",
           within=_WRITES),
    mutant("last-node-of-a-flush-lost", "session.programs_equal", "djinn.link:Link.flush",
           "self._take(None)", "self._tape.nodes[-1:] = []\n    self._take(None)"),
    mutant("dead-draw-skipped", "session.programs_equal", "djinn.tape:Signature.__init__",
           "bool(writes) or is_random or not results", "bool(writes) or not results"),
    mutant("dead-write-skipped", "session.aliases_seen", "djinn.tape:Signature.__init__",
           "bool(writes) or is_random or not results", "is_random",
           within="zero_ add_.Tensor _foreach_zero_ _foreach_neg_ view"),
    # Programs.
    mutant("operands-swapped", "session.programs_replay", "djinn.programs:program_of",
           "tuple(operands[s] for s in node.inputs)", "tuple(operands[s] for s in reversed(node.inputs))",
           within="sub.Tensor div.Tensor"),
    mutant("numbers-swapped", "session.programs_replay", "djinn.programs:lay_out",
           "numbers += node.numbers", "numbers += node.numbers[::-1] if len(node.numbers) == 2 else node.numbers", within="select.int tril"),
    mutant("program-key-without-constants", "session.operations_equal", "djinn.binding:Planner._number",
           "self._templates.setdefault(template,", "self._templates.setdefault(template.operator,",
           within="hann_window.periodic"),
    mutant("numbers-of-the-first-run-used-again", "session.optimizers_equal", "djinn.programs:ProgramTable._run",
           "to_wire(layout.numbers)", "to_wire(globals().setdefault('_first', {}).setdefault(known.number, layout.numbers))",
           within="optimizers/Adam/scheduled/*"),
    mutant("complex-number-loses-its-sign", "session.samples_forward", "djinn.protocol.messages:to_wire",
           '"imag": value.imag', '"imag": abs(value.imag)', within="add sub full linspace"),
    # Random numbers.
    mutant("seed-overtakes-draws", "session.operations_equal", "djinn.link:Link.seed", "self._take(None)", "pass",
           within=_DRAWS),
    mutant("state-lent-and-not-taken-back", "session.slices_equal",
           "djinn_executor_torch.random:TorchRandomState.lent_to_device", "self._state = generator.get_state()", "pass",
           within=_DRAWS),
    mutant("state-set-too-late", "session.programs_equal", "djinn.session:Session.set_random_state",
           "self.link.flush()", "pass"),
    # Lifetimes.
    mutant("never-freed", "session.handles_freed", "djinn.link:Link._take",
           "self._commands.append(Free(tuple(sorted(held))))", "pass", within="add.Tensor neg view"),
    mutant("absent-result-never-freed", "session.programs_equal", "djinn.recorder:Recorder.new_results",
           "self.released(number)", "pass"),
    mutant("freed-too-early", "session.programs_equal", "djinn.link:Link._take", "self._dead - busy", "set(self._dead)"),
    mutant("freed-before-its-last-use", "session.programs_equal", "djinn.protocol.service:SessionService.handle",
           "for command in batch.commands:",
           "for command in sorted(batch.commands, key=lambda command: not isinstance(command, Free)):"),
    # Failures.
    mutant("exception-of-another-type", "session.samples_refused", "djinn.protocol.failures:name_of",
           "return kind.__name__", "return 'RuntimeError'", within="diagonal unbind"),
    mutant("error-swallowed-at-a-wait", "session.programs_equal", "djinn.link:Link._raise_failure",
           "raise self._exception(*failures)", "return"),
    mutant("poison-lost", "session.programs_equal", "djinn.protocol.service:SessionService._run",
           "outputs = self._outputs_of(run)",
           "outputs = [torch.zeros(()) if isinstance(made, Poisoned) else made for made in self._outputs_of(run)]"),
    mutant("skipped-write-not-poisoned", "session.programs_equal", "djinn_executor_torch.interpreter:interpret",
           "poison_storage(operands[written], poison, known, inputs)", "pass"),
)
