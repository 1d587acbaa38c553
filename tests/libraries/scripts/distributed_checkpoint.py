"""PyTorch: `torch.distributed.checkpoint` saves and loads a model and its optimizer."""

import json
import tempfile
import warnings

import torch
from torch.distributed import checkpoint

warnings.simplefilter("ignore")
torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(2, 8).to(device)).sum().backward()
optimizer.step()
with tempfile.TemporaryDirectory() as folder:
    # begin
    checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    other = torch.nn.Linear(8, 8).to(device)
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    # end
print(json.dumps({"device": str(other.weight.device), "weights": other.weight.detach().flatten().tolist()}))
