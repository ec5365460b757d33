"""Random layer-token drop (random-LTD): layers that see some of the tokens, drawn in each step.
Importing this module is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.random_ltd.functions import mask_gather_bert as mask_gather_bert
    from opkiln.ops.random_ltd.functions import mask_gather_gpt as mask_gather_gpt
    from opkiln.ops.random_ltd.functions import token_clear as token_clear
    from opkiln.ops.random_ltd.functions import token_gather as token_gather
    from opkiln.ops.random_ltd.functions import token_scatter as token_scatter
    from opkiln.ops.random_ltd.functions import token_scatter_ as token_scatter_
    from opkiln.ops.random_ltd.functions import token_sort as token_sort
    from opkiln.ops.random_ltd.functions import token_sort_ as token_sort_
    from opkiln.ops.random_ltd.functions import token_spread as token_spread
    from opkiln.ops.random_ltd.sampling import bert_sample_tokens as bert_sample_tokens
    from opkiln.ops.random_ltd.sampling import gpt_sample_tokens as gpt_sample_tokens

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.random_ltd.functions":
        "mask_gather_bert mask_gather_gpt token_clear token_gather token_scatter token_scatter_ "
        "token_sort token_sort_ token_spread",
    "opkiln.ops.random_ltd.sampling": "bert_sample_tokens gpt_sample_tokens",
})  # fmt: skip
