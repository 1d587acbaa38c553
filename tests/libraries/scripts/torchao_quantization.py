"""torchao: layers are quantized to int8 in place, with and without their activations, saved and loaded."""

import json

import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
inputs = torch.randn(8, 32)
# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model, inputs = model.to(device), inputs.to(device)
results = {"exact": model(inputs)}
quantize_(model[0], Int8WeightOnlyConfig())
results["weights"] = model(inputs)
quantize_(model[2], Int8DynamicActivationInt8WeightConfig())
results["activations"] = model(inputs)
# end
loaded = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)).to(device)
quantize_(loaded[0], Int8WeightOnlyConfig())
quantize_(loaded[2], Int8DynamicActivationInt8WeightConfig())
loaded.load_state_dict(model.state_dict())
results["loaded"] = loaded(inputs)
print(json.dumps({"device": str(model[0].weight.device),
                  **{name: result.flatten().tolist() for name, result in results.items()}}))
