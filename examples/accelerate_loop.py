"""A loop of Accelerate; the lines marked with sw give its noise scale and its diagnosis."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from scalewise.adapters.accelerate import Scalewise  # sw
from scalewise.tasks.digits import load

torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
loader = DataLoader(TensorDataset(*load()[0]), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
Scalewise(accelerator, model, optimizer)  # sw
for _ in range(6):
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print("weights", sum(parameter.double().sum().item() for parameter in model.parameters()))
accelerator.end_training()
