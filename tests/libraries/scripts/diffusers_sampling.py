"""diffusers: Stable Diffusion with a small UNet and VAE draws from embeddings of a prompt."""

import json
import logging
import warnings

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

warnings.simplefilter("ignore")
logging.getLogger("diffusers").setLevel(logging.ERROR)
torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=16, attention_head_dim=4)
vae = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4,
                    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
                          set_alpha_to_one=False, steps_offset=1)
embeddings, negative = torch.randn(1, 4, 16), torch.randn(1, 4, 16)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
# begin
pipeline = StableDiffusionPipeline(vae=vae, text_encoder=None, tokenizer=None, unet=unet, scheduler=scheduler,
                                   safety_checker=None, feature_extractor=None, requires_safety_checker=False)
pipeline.to(device)
images = pipeline(prompt_embeds=embeddings, negative_prompt_embeds=negative, num_inference_steps=4,
                  generator=torch.Generator().manual_seed(0), output_type="np").images
# end
print(json.dumps({"device": str(pipeline.device), "images": images.astype(float).flatten()[:64].tolist()}))
