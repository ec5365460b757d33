"""Random layer-token drop (random-LTD): layers that see some of the tokens, drawn in each step.
Importing this module is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.random_ltd.functions import (
        mask_gather_bert,
        mask_gather_gpt,
        token_clear,
        token_gather,
        token_scatter,
        token_scatter_,
        token_sort,
        token_sort_,
        token_spread,
    )
    from opkiln.ops.random_ltd.sampling import bert_sample_tokens, gpt_sample_tokens

__all__ = [
    "bert_sample_tokens",
    "gpt_sample_tokens",
    "mask_gather_bert",
    "mask_gather_gpt",
    "token_clear",
    "token_gather",
    "token_scatter",
    "token_scatter_",
    "token_sort",
    "token_sort_",
    "token_spread",
]

_HOMES = {
    name: f"opkiln.ops.random_ltd.{'sampling' if '_sample_' in name else 'functions'}"
    for name in __all__
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
