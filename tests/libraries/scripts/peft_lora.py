"""peft: LoRA on a language model is trained, saved, loaded and merged."""

import json
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
tokens = torch.arange(32).reshape(2, 16) % 64
base = GPT2LMHeadModel(config).eval()
# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = get_peft_model(base.to(device), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
optimizer = torch.optim.AdamW((value for value in model.parameters() if value.requires_grad), 1e-2)
losses = []
for _ in range(4):
    loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
# end
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(GPT2LMHeadModel(config).eval().to(device), folder).merge_and_unload()
with torch.no_grad():
    logits = loaded(tokens.to(device)).logits[0, -1, :8].tolist()
print(json.dumps({"device": str(next(model.parameters()).device), "losses": losses, "logits": logits}))
