"""torchmetrics: scores are updated batch by batch on the device, and computed at the end."""

import json

import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

torch.manual_seed(0)
# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
metrics = MetricCollection([MulticlassAccuracy(4), MulticlassF1Score(4)]).to(device)
for _ in range(3):
    metrics.update(torch.randn(16, 4).to(device), torch.randint(4, (16,)).to(device))
scores = metrics.compute()
# end
print(json.dumps({"device": str(next(iter(scores.values())).device),
                  **{name: score.item() for name, score in scores.items()}}))
