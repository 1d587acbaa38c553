"""transformers: `Trainer` trains a causal language model, evaluates, and resumes from a checkpoint."""

import json
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

logging.set_verbosity_error()
data = [{"input_ids": (torch.arange(16) * step) % 64, "labels": (torch.arange(16) * step) % 64} for step in range(32)]


def new_model():
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0,
                                      embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0))


with tempfile.TemporaryDirectory() as folder:
    # begin
    arguments = TrainingArguments(output_dir=folder, max_steps=4, save_steps=2, per_device_train_batch_size=8,
                                  report_to=[], disable_tqdm=True)
    trainer = Trainer(new_model(), arguments, train_dataset=data, eval_dataset=data[:8])
    trained = trainer.train()
    evaluated = trainer.evaluate()
    # end
    resumed = Trainer(new_model(), arguments, train_dataset=data).train(resume_from_checkpoint=f"{folder}/checkpoint-2")
print(json.dumps({"device": str(arguments.device), "loss": trained.training_loss, "evaluation": evaluated["eval_loss"],
                  "steps": resumed.global_step,
                  "weights": sum(value.double().sum().item() for value in trainer.model.state_dict().values())}))
