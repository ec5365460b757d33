"""Attention with DeepSpeed's workspace of keys and values, over opkiln's ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_given import ABSENT, BATCH, HEADS, HIDDEN, TYPES, Given, warm  # noqa: F401
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError


@pytest.fixture(scope="module")
def module() -> OpModule:
    return OpModule("transformer_inference")


@pytest.fixture(params=TYPES, autouse=True)
def kind(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    name: str = request.param
    return name


@pytest.fixture
def given(kind: str) -> Given:
    return Given(kind)


class Decoder:
    """Two layers that attend, by DeepSpeed's functions and as sums in float64."""

    def __init__(self, module: Any, kind: str, given: Given, **options: Any) -> None:
        self.module, self.kind, self.given = module, kind, given
        self.options: dict[str, Any] = {
            "num_kv": 0, "rotary": 0, "half": True, "alibi": ABSENT, "window": 0, **options
        }  # fmt: skip
        self.past: list[list[Tensor]] = [[], []]
        module.release_workspace()
        module.reset_cache()
        getattr(module, f"allocate_workspace_{kind}")(HIDDEN, HEADS, 4, BATCH, 2, 1, False, 0, 16)

    def step(self, tokens: int, mask: Tensor = ABSENT) -> None:
        """Both layers see so many new tokens, and what they give is checked."""
        head, kv_heads = HIDDEN // HEADS, self.options["num_kv"] or HEADS
        alibi, window = self.options["alibi"], self.options["window"]
        for layer in range(2):
            qkv = self.given.rows(BATCH, tokens, (HEADS + 2 * kv_heads) * head)
            before = sum(each.shape[1] for each in self.past[layer])
            if tokens > 1:
                self.past[layer], before = [], 0
            self.past[layer].append(qkv.double().view(BATCH, tokens, -1, head))
            total = before + tokens
            rows = alibi[:, :, :total] if alibi.dim() > 1 else alibi
            found = getattr(self.module, f"softmax_context_{self.kind}")(
                qkv, mask, self.options["rotary"], self.options["half"], not self.options["half"],
                HEADS, self.options["num_kv"], head**-0.25, True, window > 0, window, False, layer,
                2, rows, 1e4, tokens > 1, None, None,
            )  # fmt: skip
            assert isinstance(found, list)
            every = self._rotated(torch.cat(self.past[layer], 1))
            q, k, v = (
                x.transpose(1, 2) for x in every.split_with_sizes((HEADS, kv_heads, kv_heads), 2)
            )
            k, v = (x.repeat_interleave(HEADS // kv_heads, 1) for x in (k, v))
            scores = q[:, :, before:] @ k.transpose(2, 3) * head**-0.5
            if mask.dim() > 1:
                scores = scores + mask.double().view(BATCH, 1, 1, total)
            if rows.dim() > 1:
                scores = scores + rows.double().view(BATCH, HEADS, 1, total)
            apart = torch.arange(before, total)[:, None] - torch.arange(total)
            scores = scores.masked_fill(apart < 0, -torch.inf)
            if window:
                scores = scores.masked_fill(apart >= window, -torch.inf)
            expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            self.given.agrees(found[0], expected, 4)
            self.given.agrees(found[1], k, 2)
            self.given.agrees(found[2], v)

    def _rotated(self, qkv: Tensor) -> Tensor:
        dim, values = self.options["rotary"], self.options["num_kv"] or HEADS
        if not dim:
            return qkv
        angle = torch.arange(qkv.shape[1]).double()[:, None, None] * 1e4 ** (
            -torch.arange(dim // 2).double() / (dim // 2)
        )
        out, turned = qkv.clone(), qkv[..., :-values, :dim]
        if self.options["half"]:
            one, two = turned[..., : dim // 2], turned[..., dim // 2 :]
        else:
            one, two = turned[..., 0::2], turned[..., 1::2]
        pair = (one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin())
        out[..., :-values, :dim] = (
            torch.cat(pair, -1) if self.options["half"] else torch.stack(pair, -1).flatten(-2)
        )
        return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv": 2},
        {"rotary": 8},
        {"rotary": 8, "half": False, "num_kv": 1},
        {"alibi": True},
    ],
    ids=["plain", "grouped", "rotated", "rotated-pairs", "alibi"],
)
def test_attention_appends_to_a_cache(
    module: Any, given: Given, kind: str, options: dict[str, Any]
) -> None:
    if options.get("alibi") is True:
        options = {"alibi": given.rows(BATCH * HEADS, 1, 16)}
    decoder = Decoder(module, kind, given, **options)
    decoder.step(4)
    decoder.step(1)
    decoder.step(1)
    hidden = torch.zeros(BATCH, 7)
    hidden[0, :2] = -10000.0
    decoder.step(1, hidden.to(given.dtype).view(BATCH, 1, 1, 7))
    decoder.step(3)  # a new prompt begins anew
    decoder.step(1)


def test_a_prompt_sees_a_window(module: Any, given: Given, kind: str) -> None:
    Decoder(module, kind, given, window=3).step(6)


def test_the_cache_has_an_end_and_a_beginning(module: Any, given: Given, kind: str) -> None:
    decoder = Decoder(module, kind, given)
    with pytest.raises(UsageError, match="17 tokens, the workspace has room for 16"):
        decoder.step(17)
    decoder.step(4)
    assert module.retake_workspace() is True
    module.release_workspace()
    with pytest.raises(UsageError, match="a prompt comes first"):
        decoder.step(1)


def test_a_prompts_cache_is_copied_for_more_sequences(module: Any, given: Given, kind: str) -> None:
    decoder = Decoder(module, kind, given)
    repeat = getattr(module, f"repeat_kv_cache_{kind}")
    with pytest.raises(UsageError, match="no prompt"):
        repeat(1, BATCH)
    decoder.step(4)
    expected = [[x[:1].clone() for x in module_cache] for module_cache in _caches(decoder)]
    found = repeat(1, BATCH)
    assert len(found) == 4
    for one, two in zip(found, [x for layer in expected for x in layer], strict=True):
        given.agrees(one, two.expand(BATCH, -1, -1, -1))
    with pytest.raises(UsageError, match="the workspace is for 2"):
        repeat(2, 2)


def _caches(decoder: Decoder) -> list[list[Tensor]]:
    """The keys and values of each layer, in float64."""
    found = []
    for past in decoder.past:
        _, k, v = (x.transpose(1, 2) for x in torch.cat(past, 1).chunk(3, 2))
        found.append([k, v])
    return found
