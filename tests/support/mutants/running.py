"""Faults of running programs, and of what travels."""

from __future__ import annotations

from support.mutants.planting import SERVED, TCP, mutant

MUTANTS = (
    # The interpreter, which runs a program the first time.
    mutant("keyword-dropped", "session.operations_equal", "djinn_plugins.common.calls.arguments:fill",
           "{name: _value(argument, tensors, values) for name, argument in keywords}",
           "{name: _value(argument, tensors, values) for name, argument in keywords if name != 'alpha'}",
           within="add.Tensor"),
    mutant("list-truncated", "session.operations_equal", "djinn_plugins.common.calls.arguments:_value",
           "for item in argument.items]", "for item in argument.items][:2]", within="cat stack"),
    mutant("view-run-as-a-copy", "session.aliases_seen", "djinn_plugins.common.calls.binding:results_of",
           "results.append(value)",
           "results.append(value.clone() if value is not None and value.storage_offset() else value)",
           within="select.int slice.Tensor narrow"),
    mutant("list-of-views-run-as-copies", "session.aliases_seen", "djinn_plugins.common.calls.binding:results_of",
           "results += value", "results += [item.clone() for item in value]",
           within="split.Tensor unbind.int"),
    # The compiled program, from the second run on.
    mutant("result-dropped-too-early", "session.optimizers_equal", "djinn_plugins.executor.torch.codegen:straight_line",
           "gone = dead.get(position, [])", "gone = dead.get(position + 1, [])",
           within="optimizers/Adam/scheduled/*"),
    mutant("numbers-of-the-wrong-step", "session.programs_replay", "djinn_plugins.executor.torch.codegen:straight_line",
           "taken += call.numbers", "taken += 0", within="mul.Scalar add.Scalar select.int"),
    mutant("keyword-compiled-away", "session.programs_replay", "djinn_plugins.executor.torch.codegen:straight_line",
           "for name, argument in call.keywords]", "for name, argument in call.keywords if name != 'dtype']",
           within="sum.dim_IntList zeros_like ones_like"),
    # Compiled modules on the device.
    mutant("writes-of-a-repeated-call-not-counted", "session.compiled_recorded",
           "djinn_plugins.device.dynamo.remote_plans:RemotePlan.submit", "for position in self.counted:",
           "for position in ():"),
    mutant("gradients-of-several-uses-added-early", "session.compiled_recorded",
           "djinn_plugins.device.dynamo.autograd_templates:AutogradTemplate.differentiate", "if uses > 1 else",
           "if uses > 99 else"),
    mutant("gradient-of-another-result", "session.compiled_recorded",
           "djinn_plugins.device.dynamo.remote_gradients:TrainedCall.backward",
           "None if gradient is None else gradient._value.spec for", "None for"),
    # What travels.
    mutant("halves-mixed-up", "session.operations_equal", "djinn.wire.tensors:header_of",
           "    if name is None",
           "    name = {'float16': 'bfloat16', 'bfloat16': 'float16'}.get(name, name)\n    if name is None",
           within="neg add.Tensor", over=TCP),
    mutant("strides-dropped-on-the-way", "session.operations_equal",
           "djinn_plugins.common.memory.tensor_bytes:empty_from",
           "torch.empty_strided(header.size, header.stride, ", "torch.empty(header.size, ",
           within="neg transpose.int permute", over=TCP),
    mutant("strides-dropped-on-the-way-home", "session.served_equals_local",
           "djinn_plugins.common.memory.tensor_bytes:empty_from",
           "torch.empty_strided(header.size, header.stride, ", "torch.empty(header.size, ",
           within="neg transpose.int permute", over=SERVED),
)
