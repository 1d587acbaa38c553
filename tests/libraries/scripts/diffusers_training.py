"""diffusers: a UNet learns to predict noise on the device that `torch.accelerator` names."""

import json

import torch
from diffusers import DDPMScheduler, UNet2DModel

torch.manual_seed(0)
# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
                   norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                   up_block_types=("AttnUpBlock2D", "UpBlock2D")).to(device)
scheduler = DDPMScheduler(num_train_timesteps=10)
optimizer = torch.optim.AdamW(unet.parameters(), 1e-3)
losses = []
for _ in range(3):
    images, noise = torch.randn(2, 1, 8, 8).to(device), torch.randn(2, 1, 8, 8).to(device)
    steps = torch.randint(10, (2,)).to(device)
    loss = torch.nn.functional.mse_loss(unet(scheduler.add_noise(images, noise, steps), steps).sample, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
# end
print(json.dumps({"device": str(unet.device), "losses": torch.stack(losses).tolist()}))
