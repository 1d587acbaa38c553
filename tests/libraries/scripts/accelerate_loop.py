"""accelerate: `prepare`, accumulated gradients, clipping, `gather`, checkpoints, fp16 and bf16."""

import json
import tempfile

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState


def train(precision):
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    # begin
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1),
                                                   torch.utils.data.DataLoader(data, 8))
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()))
    # end
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        before = [value.clone() for value in accelerator.unwrap_model(model).parameters()]
        with torch.no_grad():
            for value in accelerator.unwrap_model(model).parameters():
                value.add_(1)
        accelerator.load_state(folder)
        kept = all(map(torch.equal, before, accelerator.unwrap_model(model).parameters()))
    return str(accelerator.device), torch.stack(losses).flatten().tolist(), kept


has_accelerator = torch.accelerator.is_available()
device, full, kept = train("no")
print(json.dumps({"device": device, "full": full, "kept": kept, "brain": train("bf16")[1], "tolerance": 0.01,
                  "half": train("fp16")[1] if has_accelerator else full}))
