"""PyTorch: a `DataLoader` with worker processes and pinned memory feeds a training loop."""

import json

import torch


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        inputs = torch.arange(4.0) + index
        return inputs / 32, inputs.sum(0, keepdim=True) / 128


if __name__ == "__main__":
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    # begin
    loader = torch.utils.data.DataLoader(Lines(), batch_size=8, shuffle=True, num_workers=2,
                                         pin_memory=torch.accelerator.is_available(),
                                         generator=torch.Generator().manual_seed(0))
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs.to(device, non_blocking=True)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    # end
    print(json.dumps({"device": str(model.weight.device), "losses": torch.stack(losses).tolist()}))
