"""DeepSpeed's modules ``random_ltd`` and ``spatial_inference`` over opkiln's ops."""

from __future__ import annotations

import pytest
import torch
from deepspeed_given import warm  # noqa: F401 (a fixture)
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule

SEQUENCES, TOKENS, KEPT, CHANNELS, LAYERS = 2, 24, 10, 16, 3


@pytest.fixture(scope="module")
def ltd() -> OpModule:
    return OpModule("random_ltd")


@pytest.fixture(scope="module")
def spatial() -> OpModule:
    return OpModule("spatial_inference")


def _drawn() -> Tensor:
    found = torch.rand(LAYERS, SEQUENCES, TOKENS).argsort(-1)[..., :KEPT]
    return found.to(torch.int32)


def test_tokens_are_sorted_in_place_and_given_back(ltd: OpModule) -> None:
    indices = _drawn()
    expected = indices.sort(-1).values
    assert ltd.token_sort_(indices, TOKENS) is indices
    assert torch.equal(indices, expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_tokens_are_gathered_and_scattered_in_place(ltd: OpModule, batch_first: bool) -> None:
    indices = _drawn()[0]
    shape = (SEQUENCES, TOKENS) if batch_first else (TOKENS, SEQUENCES)
    x = torch.randn(*shape, CHANNELS, dtype=torch.float16, requires_grad=True)
    part = ltd.token_gather(x, indices, batch_first)
    assert not part.requires_grad
    for b in range(SEQUENCES):
        mine = x[b] if batch_first else x[:, b]
        assert torch.equal(part[b] if batch_first else part[:, b], mine[indices[b]])
    every = torch.zeros_like(x).detach()
    version = every._version
    assert ltd.token_scatter_(every, part, indices, batch_first) is every
    assert every._version > version
    assert torch.equal(ltd.token_gather(every, indices, batch_first), part)
    assert every.count_nonzero() == part.count_nonzero()


def test_masks_are_cut_to_the_kept_tokens(ltd: OpModule) -> None:
    mask, indices = torch.randn(SEQUENCES, 1, TOKENS, TOKENS), _drawn()
    found = ltd.mask_gather_bert(mask, indices)
    assert found.shape == (LAYERS, SEQUENCES, 1, KEPT, KEPT)
    for layer in range(LAYERS):
        for b in range(SEQUENCES):
            at = indices[layer, b]
            assert torch.equal(found[layer, b, 0], mask[b, 0][at][:, at])
    assert torch.equal(ltd.mask_gather_gpt(mask, KEPT), mask[:, :, :KEPT, :KEPT])


@pytest.mark.parametrize("shape", [(2, 8, 5, 3), (2, 7, 8)], ids=["images", "sequences"])
def test_biases_and_residuals_are_added(spatial: OpModule, shape: tuple[int, ...]) -> None:
    x, other = torch.randn(2, *shape).half()
    bias, other_bias = torch.randn(2, 8).half()
    if len(shape) == 4:
        x, other = (each.to(memory_format=torch.channels_last) for each in (x, other))

    def wide(each: Tensor) -> Tensor:
        return each.double().view(-1, 1, 1) if len(shape) == 4 else each.double()

    exact = x.double() + wide(bias)
    for found, expected in (
        (spatial.nhwc_bias_add(x, bias), exact),
        (spatial.nhwc_bias_add_add(x, bias, other), exact + other.double()),
        (
            spatial.nhwc_bias_add_bias_add(x, bias, other, other_bias),
            exact + other.double() + wide(other_bias),
        ),
    ):
        assert found.stride() == x.stride()
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.double(), expected, rtol=2**-11, atol=1e-6)
