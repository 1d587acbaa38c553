"""trl: `SFTTrainer` fine-tunes a language model on a prepared data set."""

import json
import tempfile
import warnings

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

warnings.simplefilter("ignore")
logging.set_verbosity_error()
set_seed(0)
words = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{number}" for number in range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
data = Dataset.from_list([{"text": " ".join(f"w{(start + step) % 62}" for step in range(12))} for start in range(32)])
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0,
                                   embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=1))
with tempfile.TemporaryDirectory() as folder:
    # begin
    trainer = SFTTrainer(model, args=SFTConfig(
        output_dir=folder, max_steps=3, per_device_train_batch_size=8, max_length=16, bf16=False, save_strategy="no",
        report_to=[], disable_tqdm=True), train_dataset=data, processing_class=tokenizer)
    trained = trainer.train()
    # end
print(json.dumps({"device": str(trainer.args.device), "loss": trained.training_loss}))
