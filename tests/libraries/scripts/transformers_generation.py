"""transformers: `device_map="auto"`, `generate`, and a `pipeline` that names no device."""

import json
import tempfile

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pipelines.base import Pipeline
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.manual_seed(0)
prompt = torch.arange(5)[None]


class Scores(Pipeline):
    def _sanitize_parameters(self):
        return {}, {}, {}

    def preprocess(self, tokens):
        return {"input_ids": tokens}

    def _forward(self, inputs):
        return self.model(**inputs)

    def postprocess(self, outputs):
        return outputs.logits[0, -1, :4].tolist()


with tempfile.TemporaryDirectory() as folder:
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
                               eos_token_id=0)).save_pretrained(folder)
    # begin
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    tokens = model.generate(prompt.to(model.device), max_new_tokens=12, do_sample=False, pad_token_id=0)
    # end
    pipeline = Scores(model=AutoModelForCausalLM.from_pretrained(folder))
    scores = pipeline(prompt)
print(json.dumps({"device": str(model.device), "pipeline": str(pipeline.device.type == model.device.type),
                  "tokens": tokens.tolist(), "scores": scores}))
