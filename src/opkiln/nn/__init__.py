"""Pieces of models. Importing this package is cheap: each name is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.nn.layer import TransformerLayer
    from opkiln.ops.evoformer_attn.attention import evoformer_attention
    from opkiln.ops.sparse_attn.attention import SparseSelfAttention

__all__ = ["SparseSelfAttention", "TransformerLayer", "evoformer_attention"]

_MODULES = ("core", "inference", "ragged", "random_ltd", "sparse_attention", "spatial")
_HOMES = {
    "SparseSelfAttention": "opkiln.ops.sparse_attn.attention",
    "TransformerLayer": "opkiln.nn.layer",
    "evoformer_attention": "opkiln.ops.evoformer_attn.attention",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_HOMES})
