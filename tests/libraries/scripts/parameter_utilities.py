"""PyTorch: `torch.nn.utils`: parametrizations, pruning, clipping, vectors of parameters, packed sequences."""

import json

import torch
from torch.nn import utils
from torch.nn.utils import parametrizations, prune, rnn

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
# begin
layer = parametrizations.weight_norm(torch.nn.Linear(4, 4)).to(device)
pruned = prune.l1_unstructured(torch.nn.Linear(4, 4).to(device), "weight", amount=0.5)
loss = (pruned(layer(torch.randn(3, 4).to(device)))).square().mean()
loss.backward()
norm = utils.clip_grad_norm_(layer.parameters(), 0.1)
vector = utils.parameters_to_vector(layer.parameters())
# end
recurrent = torch.nn.LSTM(2, 3, batch_first=True).to(device)
packed = rnn.pack_sequence([torch.randn(3, 2).to(device), torch.randn(2, 2).to(device)])
output, lengths = rnn.pad_packed_sequence(recurrent(packed)[0], batch_first=True)
print(json.dumps({"device": str(vector.device), "loss": loss.item(), "norm": norm.item(),
                  "vector": vector.detach().tolist(), "lengths": lengths.tolist(),
                  "output": output.detach().flatten().tolist(), "pruned": (pruned.weight == 0).sum().item()}))
