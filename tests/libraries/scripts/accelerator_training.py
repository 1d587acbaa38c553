"""PyTorch: training with autocast and a `GradScaler` on `torch.accelerator`."""

import json

import torch

torch.manual_seed(0)
# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3)).to(device)
optimizer = torch.optim.AdamW(layers.parameters(), 1e-2)
scaler = torch.amp.GradScaler(device.type)
losses = []
for _ in range(4):
    x = torch.randn(8, 16).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        y = x
        for layer in layers:
            y = layer(y).relu()
        loss = (y - x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.detach().float())
# end
if torch.accelerator.is_available():
    torch.accelerator.synchronize()
print(json.dumps({"device": str(losses[0].device), "losses": torch.stack(losses).tolist(), "tolerance": 0.01}))
