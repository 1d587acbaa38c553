"""Lightning: `Trainer` with the automatic accelerator, in 32 bits and with `precision="bf16-mixed"`."""

import json
import logging
import warnings

import lightning
import torch

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch, index):
        self.log("validated", self.training_step(batch, index))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(**options):
    lightning.seed_everything(0, verbose=False)
    model = Regression()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), 16)
    # begin
    trainer = lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False, **options)
    trainer.fit(model, loader)
    validated = trainer.validate(model, loader, verbose=False)
    # end
    weights = sum(value.detach().double().sum().item() for value in model.parameters())
    return str(trainer.strategy.root_device), [weights, validated[0]["validated"]]


device, full = fit()
print(json.dumps({"device": device, "full": full, "mixed": fit(precision="bf16-mixed")[1], "tolerance": 0.01}))
