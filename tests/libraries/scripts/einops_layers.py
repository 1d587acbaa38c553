"""einops: `rearrange`, `reduce`, `repeat`, `einsum` and layers."""

import json

import torch
from einops import einsum, rearrange, reduce, repeat
from einops.layers.torch import Rearrange

torch.manual_seed(0)
# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
images = torch.randn(2, 3, 8, 8).to(device)
patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
scores = einsum(patches, patches, "b i d, b j d -> b i j")
# end
flat = torch.nn.Sequential(Rearrange("b i j -> b (i j)"), torch.nn.Linear(16, 4)).to(device)
print(json.dumps({"device": str(scores.device), "scores": scores.flatten().tolist(),
                  "mean": reduce(images, "b c h w -> c", "mean").tolist(),
                  "wide": repeat(flat(scores), "b d -> (b two) d", two=2).tolist()}))
