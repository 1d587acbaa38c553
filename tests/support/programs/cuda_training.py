"""Trains a small model with mixed precision, as scripts for CUDA do; prints losses, and what the model then says."""

from __future__ import annotations

import argparse
import io

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true", help="the same arithmetic, on the CPU")
arguments = parser.parse_args()

use_cuda = torch.cuda.is_available() and not arguments.cpu
device = torch.device("cuda" if use_cuda else "cpu")
torch.manual_seed(0)
if use_cuda:
    torch.cuda.manual_seed_all(0)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.reset_peak_memory_stats()

data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
loader = DataLoader(data, batch_size=16, num_workers=1, pin_memory=use_cuda)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
model = nn.DataParallel(model).cuda() if use_cuda else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=3)
criterion = nn.CrossEntropyLoss().to(device)

for epoch in range(2):
    for batch in loader:
        inputs, targets = (item.to(device, non_blocking=True) for item in batch)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.float16):
            loss = criterion(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch} loss {loss.item():.7f} scale {scaler.get_scale()}")

file = io.BytesIO()
plain = model.module if use_cuda else model
torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, file)
file.seek(0)
saved = torch.load(file, map_location=device)
plain.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
plain.eval()
with torch.no_grad():
    said = plain(data.tensors[0][:4].to(device))
assert said.is_cuda == use_cuda
print([[f"{value:.6f}" for value in row] for row in said.float().cpu().tolist()])
assert not use_cuda or torch.cuda.max_memory_allocated() > 0
