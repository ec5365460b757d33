"""Knows nothing of opkiln: one step of DeepSpeed's CPU Adam."""

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

parameter = torch.nn.Parameter(torch.ones(4))
optimizer = DeepSpeedCPUAdam([parameter], lr=0.5)
parameter.grad = torch.ones(4)
optimizer.step()
print(parameter.tolist())
