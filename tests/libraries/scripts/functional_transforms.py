"""PyTorch: `torch.func` computes gradients per sample, Hessians, and ensembles."""

import json

import torch
from torch.func import functional_call, grad, hessian, jacrev, stack_module_state, vmap

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
models = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(device)
          for _ in range(3)]
inputs, targets = torch.randn(5, 3).to(device), torch.randn(5, 1).to(device)


# begin
def loss(parameters, one, target):
    return torch.nn.functional.mse_loss(functional_call(models[0], parameters, (one,)), target)


parameters = {name: value.detach() for name, value in models[0].named_parameters()}
per_sample = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
# end
curvature = hessian(lambda x: functional_call(models[0], parameters, (x,)).sum())(inputs[0])
stacked, buffers = stack_module_state(models)
ensemble = vmap(lambda p, b: functional_call(models[0], (p, b), (inputs,)))(stacked, buffers)
jacobian = jacrev(lambda x: functional_call(models[0], parameters, (x,)))(inputs[0])
print(json.dumps({"device": str(ensemble.device), "per_sample": per_sample["0.weight"].flatten().tolist(),
                  "curvature": curvature.tolist(), "ensemble": ensemble.detach().flatten().tolist(),
                  "jacobian": jacobian.tolist()}))
