"""Pyro: stochastic variational inference of a regression, and a no-U-turn sampler."""

import json

import pyro
import torch
from pyro import distributions as dist
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

torch.manual_seed(0)
inputs = torch.randn(16, 2)
targets = inputs @ torch.tensor([1.0, -1.0]) + 0.1
# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
inputs, targets = inputs.to(device), targets.to(device)


def model(inputs, targets):
    weights = pyro.sample("weights", dist.Normal(torch.zeros(2).to(device), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.HalfNormal(torch.tensor(1.0).to(device)))
    with pyro.plate("data", len(inputs)):
        pyro.sample("targets", dist.Normal(inputs @ weights, noise), obs=targets)


pyro.set_rng_seed(0)
inference = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
losses = [inference.step(inputs, targets) for _ in range(6)]
# end
pyro.set_rng_seed(0)
chain = MCMC(NUTS(model, max_tree_depth=3), num_samples=4, warmup_steps=4, disable_progbar=True)
chain.run(inputs, targets)
weights = chain.get_samples()["weights"]
print(json.dumps({"device": str(weights.device), "losses": losses, "weights": weights.flatten().tolist()}))
