"""torchdiffeq: a vector field is learned through an adaptive solver, with the adjoint method and without."""

import json

import torch
from torchdiffeq import odeint, odeint_adjoint

torch.manual_seed(0)


class Field(torch.nn.Module):
    """A small network that gives the derivative."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def forward(self, time, state):
        """Give the derivative of a state."""
        return self.layers(state**3)


# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
field = Field().to(device)
times, start = torch.linspace(0, 1, 5).to(device), torch.tensor([[2.0, 0.0]]).to(device)
optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
losses = []
for solve in (odeint, odeint_adjoint):
    for _ in range(2):
        optimizer.zero_grad()
        loss = solve(field, start, times, rtol=1e-3, atol=1e-3, method="dopri5").square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
# end
print(json.dumps({"device": str(odeint(field, start, times, method="rk4").device), "losses": losses}))
