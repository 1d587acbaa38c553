"""transformers: `Trainer` trains a classifier with `bf16=True`, and predicts."""

import json
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

logging.set_verbosity_error()
set_seed(0)
data = [{"input_ids": (torch.arange(12) * step) % 32, "labels": step % 2} for step in range(32)]
model = BertForSequenceClassification(BertConfig(
    vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
with tempfile.TemporaryDirectory() as folder:
    # begin
    arguments = TrainingArguments(output_dir=folder, max_steps=4, per_device_train_batch_size=8, bf16=True,
                                  use_cpu=not torch.accelerator.is_available(), save_strategy="no", report_to=[],
                                  disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=data)
    trained = trainer.train()
    predictions = trainer.predict(data[:4]).predictions
    # end
print(json.dumps({"device": str(arguments.device), "loss": trained.training_loss,
                  "predictions": predictions.astype(float).tolist(), "tolerance": 0.01}))
