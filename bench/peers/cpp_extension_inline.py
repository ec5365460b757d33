"""torch.utils.cpp_extension: a one-line function by its load_inline."""

from __future__ import annotations

import os
from typing import Any

from peers import cpp_extension

bring = cpp_extension.bring
check = cpp_extension.check


def load() -> Any:
    """The extension module, built first where it is not."""
    from torch.utils.cpp_extension import load_inline

    directory = os.path.join(os.environ["BENCH_BUILD_DIR"], "twice_inline")
    os.makedirs(directory, exist_ok=True)
    return load_inline(
        name="twice_inline",
        cpp_sources=["torch::Tensor twice(torch::Tensor x) { return x * 2; }"],
        functions=["twice"],
        build_directory=directory,
    )
