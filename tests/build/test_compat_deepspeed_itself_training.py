"""DeepSpeed's training layer from PyPI on opkiln, beside the same layer in float64.

They need an interpreter that has DeepSpeed, as ``test_compat_deepspeed_itself.py`` does.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from deepspeed_programs import PYTHON, Programs

if PYTHON is None:
    pytest.skip("there is no DeepSpeed here: make test-deepspeed", allow_module_level=True)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "cache", tmp_path)


LAYERS = """
    import itertools, math
    import opkiln.compat.deepspeed as on_opkiln
    on_opkiln.install()
    import deepspeed, torch
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder.stochastic_transformer import StochasticTransformerBuilder
    from deepspeed.ops.op_builder.transformer import TransformerBuilder
    from deepspeed.ops.transformer import transformer as theirs
    from torch.nn import functional as F
    # DeepSpeed takes these from its list for GPUs: here they are given by hand.
    theirs.TransformerBuilder = TransformerBuilder
    theirs.StochasticTransformerBuilder = StochasticTransformerBuilder

    HIDDEN, HEADS, WIDE, EPS = 64, 4, 96, 1e-5

    def plain(layer, x, mask):
        w = {name: each.detach().double() for name, each in layer.named_parameters()}
        w = {name: each.requires_grad_() for name, each in w.items()}
        x = x.detach().double().requires_grad_()
        norm = lambda y, name: F.layer_norm(y, (HIDDEN,), w[name + "w"], w[name + "b"], EPS)
        def attention(y):
            parts = F.linear(y, w["attn_qkvw"], w["attn_qkvb"]).chunk(3, -1)
            q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
            shares = (q @ k.mT / math.sqrt(HIDDEN // HEADS) + mask.double()).softmax(-1)
            return F.linear((shares @ v).transpose(1, 2).flatten(2), w["attn_ow"], w["attn_ob"])
        def mlp(y):
            wide = F.gelu(F.linear(y, w["inter_w"], w["inter_b"]), approximate="tanh")
            return F.linear(wide, w["output_w"], w["output_b"])
        if layer.config.pre_layer_norm:
            y = x + attention(norm(x, "norm_"))
            out = y + mlp(norm(y, "attn_n"))
        else:
            y = norm(x + attention(x), "attn_n")
            out = norm(y + mlp(y), "norm_")
        return out, [x, *w.values()]

    def made(**words):
        config = theirs.DeepSpeedTransformerConfig(
            batch_size=2, hidden_size=HIDDEN, intermediate_size=WIDE, heads=HEADS,
            num_hidden_layers=1, initializer_range=0.2, layer_norm_eps=EPS, seed=3,
            attn_dropout_ratio=words.pop("p", 0.0), hidden_dropout_ratio=words.pop("q", 0.0),
            **words)
        layer = theirs.DeepSpeedTransformerLayer(config)
        for each in layer.parameters():
            each.data.add_(torch.randn_like(each), alpha=0.1)
        return layer

    torch.manual_seed(0)
"""


def test_deepspeeds_training_layers_have_the_plain_layers_gradients(programs: Programs) -> None:
    """With every flag, and sequences that DeepSpeed pads to 16 tokens."""
    found = programs.answer(
        LAYERS
        + """
    worst, count = 0.0, 0
    for pre, norms, gelu, attention, relaxed in itertools.product((True, False), repeat=5):
        layer = made(pre_layer_norm=pre, normalize_invertible=norms, gelu_checkpoint=gelu,
                     attn_dropout_checkpoint=attention, stochastic_mode=relaxed)
        for tokens in (16, 11):
            x = torch.randn(2, tokens, HIDDEN, requires_grad=True)
            mask = torch.zeros(2, 1, 1, tokens)
            mask[1, ..., -4:] = -10000.0
            out = layer(x, mask)
            expected, wide = plain(layer, x, mask)
            grad = torch.randn_like(out)
            ours = torch.autograd.grad(out, [x, *layer.parameters()], grad)
            exact = torch.autograd.grad(expected, wide, grad.double())
            for one, other in zip((out, *ours), (expected, *exact)):
                worst = max(worst, ((one - other).norm() / other.norm()).item())
                count += 1
    answer = [worst, count, sorted((name, each.origin) for name, each in
                                   on_opkiln.served().items())]
    """
    )
    assert found[0] < 2e-6
    assert found[1] == 32 * 2 * 14
    assert found[2] == [["stochastic_transformer", "ops"], ["transformer", "ops"]]


def test_deepspeeds_training_layer_learns_with_dropout(programs: Programs) -> None:
    """The front end keeps what the backward pass needs: dropout is the same in it. With torch's
    seed a run repeats itself, whatever is computed again."""
    found = programs.answer(
        LAYERS
        + """
    def losses(**words):
        torch.manual_seed(1)
        layer = made(p=0.1, q=0.1, **words)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
        x, mask = torch.randn(2, 16, HIDDEN), torch.zeros(2, 1, 1, 16)
        seen = []
        for _ in range(30):
            loss = (layer(x, mask) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        layer.eval()
        with torch.no_grad():
            assert torch.equal(layer(x, mask), layer(x, mask))
        return seen

    answer = [losses(), losses(normalize_invertible=True, gelu_checkpoint=True,
                               attn_dropout_checkpoint=True)]
    """
    )
    plain, again = found
    assert plain[-1] < plain[0] / 2
    assert again == pytest.approx(plain, rel=1e-3)


def test_opkiln_run_serves_a_program_that_does_not_know_it(programs: Programs) -> None:
    program = LAYERS.replace("    on_opkiln.install()\n", "")
    assert program != LAYERS
    program += """
    layer = made()
    x, mask = torch.randn(2, 16, HIDDEN, requires_grad=True), torch.zeros(2, 1, 1, 16)
    out = layer(x, mask)
    out.sum().backward()
    assert torch.allclose(out.double(), plain(layer, x, mask)[0], atol=1e-4)
    print("served by", on_opkiln.served()["transformer"].origin)
    """
    (programs.folder / "train.py").write_text(textwrap.dedent(program))
    done = programs.run("-m", "opkiln", "run", str(PYTHON), "train.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "served by ops" in done.stdout.splitlines()
