"""Mistakes that ``mypy --strict`` must find: each line that ends so is one."""

from __future__ import annotations

import torch
from right import scaled_add

import opkiln

scaled_add(torch.ones(2))  # wrong
scaled_add(torch.ones(2), torch.ones(2), scale="half")  # wrong
opkiln.optim.CPUAdam([torch.ones(2)], lr="1e-3")  # wrong
opkiln.seal(1)  # wrong
opkiln.load("name")  # wrong
print(opkiln.no_such_name)  # wrong
