"""Train a small model with a native optimizer. The first run compiles it; later ones load it."""

import time

import torch

import opkiln

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
data, target = torch.randn(512, 64), torch.randn(512, 1)

optimizer = opkiln.optim.CPUAdam(model.parameters(), lr=1e-3, weight_decay=0.01)

start = time.perf_counter()
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(data), target)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f} after {time.perf_counter() - start:.2f} s")
print(opkiln.explain("cpu_adam"))
