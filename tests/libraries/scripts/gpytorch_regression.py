"""gpytorch: an exact Gaussian process learns its kernel, and predicts with a confidence region."""

import json

import gpytorch
import torch

torch.manual_seed(0)
inputs = torch.linspace(0, 1, 24)
targets = torch.sin(inputs * 6) + 0.1 * torch.randn(24)


class Process(gpytorch.models.ExactGP):
    """A constant mean and an RBF kernel."""

    def __init__(self, inputs, targets, likelihood):
        super().__init__(inputs, targets, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, inputs):
        """Give the prior at the inputs."""
        return gpytorch.distributions.MultivariateNormal(self.mean(inputs), self.kernel(inputs))


# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
inputs, targets = inputs.to(device), targets.to(device)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Process(inputs, targets, likelihood).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = -objective(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
# end
model.eval()
with torch.no_grad(), gpytorch.settings.fast_pred_var():
    predicted = likelihood(model(torch.linspace(0, 1, 7).to(device)))
print(json.dumps({"device": str(predicted.mean.device), "losses": losses, "mean": predicted.mean.tolist(),
                  "lower": predicted.confidence_region()[0].tolist()}))
