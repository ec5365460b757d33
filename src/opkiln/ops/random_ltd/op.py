"""What ``random_ltd`` is compiled from. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.authoring.library import library

kit = library(
    "random_ltd",
    "cpu.cpp",
    cuda=("tokens.cu", "masks.cu", "sort.cu"),
    schemas=(
        "token_sort(Tensor indices, SymInt tokens) -> Tensor",
        "token_sort_(Tensor(a!) indices, SymInt tokens) -> ()",
        "token_gather(Tensor x, Tensor indices, bool batch_first=True) -> Tensor",
        "token_scatter(Tensor x, Tensor part, Tensor indices, bool batch_first=True) -> Tensor",
        "token_scatter_(Tensor(a!) x, Tensor part, Tensor indices, bool batch_first=True) -> ()",
        (
            "token_spread(Tensor part, Tensor indices, SymInt tokens, bool batch_first=True)"
            " -> Tensor"
        ),
        "token_clear(Tensor x, Tensor indices, bool batch_first=True) -> Tensor",
        "mask_gather_bert(Tensor mask, Tensor indices) -> Tensor",
        "mask_gather_gpt(Tensor mask, SymInt kept) -> Tensor",
    ),
    functions="opkiln.ops.random_ltd.functions",
    namespace="opkiln",
)
