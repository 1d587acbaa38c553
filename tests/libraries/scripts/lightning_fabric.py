"""Lightning: `Fabric` sets up a model, an optimizer and a loader, and runs the backward pass."""

import json

import torch
from lightning.fabric import Fabric

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), 8)
# begin
fabric = Fabric(devices=1)
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
losses = []
for inputs, targets in fabric.setup_dataloaders(loader):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    fabric.backward(loss)
    optimizer.step()
    losses.append(loss.item())
# end
print(json.dumps({"device": str(fabric.device), "losses": losses}))
