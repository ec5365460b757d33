"""Knows nothing of opkiln: `python use.py` builds with torch, `opkiln run use.py` with opkiln."""

from pathlib import Path

import torch
from torch.utils.cpp_extension import load

load("twice", [str(Path(__file__).with_name("twice.cpp"))], is_python_module=False, verbose=True)
print(torch.ops.drop_in.twice(torch.arange(3.0)).tolist())
