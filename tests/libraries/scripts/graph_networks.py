"""PyTorch Geometric: graph convolutions, attention, pooling, and batches of graphs of different sizes."""

import json

import torch
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, TopKPooling, global_max_pool, global_mean_pool

torch.manual_seed(0)
graphs = [Data(x=torch.randn(size, 8), edge_index=torch.randint(0, size, (2, 3 * size)), y=torch.randint(0, 2, (1,)))
          for size in (4, 6, 5, 3, 7, 8)]


class Network(torch.nn.Module):
    """Three kinds of convolutions, and a pooling that chooses nodes."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = GCNConv(8, 8), GATConv(8, 4, heads=2), SAGEConv(8, 8)
        self.pool, self.head = TopKPooling(8, 0.5), torch.nn.Linear(16, 2)

    def forward(self, batch):
        """Classify graphs."""
        x, edges = batch.x, batch.edge_index
        for layer in (self.first, self.second, self.third):
            x = layer(x, edges).relu()
        x, _, _, where, _, _ = self.pool(x, edges, batch=batch.batch)
        return self.head(torch.cat([global_mean_pool(x, where), global_max_pool(x, where)], 1))


# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = Network().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(2):
    for loaded in DataLoader(graphs, batch_size=3):
        batch = loaded.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
# end
print(json.dumps({"device": str(model(batch).device), "losses": losses, "scores": model(batch).tolist()}))
