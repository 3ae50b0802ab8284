"""A plain PyTorch loop; the lines marked with sw give its noise scale and its diagnosis."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import scalewise as sw  # sw

torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(4096, 20)
labels = (inputs @ torch.randn(20, 5) + torch.randn(4096, 5)).argmax(1)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

watcher = sw.watch(model, optimizer)  # sw
for epoch in range(5):
    correct = 0
    for batch, target in loader:
        output = model(batch)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct += int((output.argmax(1) == target).sum())
    print(f"epoch {epoch}: training accuracy {correct / 4096:.4f}")

print("weights", sum(parameter.double().sum().item() for parameter in model.parameters()))
print(watcher.summary())  # sw
