"""DeepSpeed's inference layers from PyPI on opkiln, beside DeepSpeed's own code in torch.

They need an interpreter that has DeepSpeed, as ``test_compat_deepspeed_itself.py`` does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_programs import PYTHON, Programs

if PYTHON is None:
    pytest.skip("there is no DeepSpeed here: make test-deepspeed", allow_module_level=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all: each op is compiled once."""
    return tmp_path_factory.mktemp("store") / "cache"


@pytest.fixture
def programs(store: Path, tmp_path: Path) -> Programs:
    return Programs(store, tmp_path)


FALLBACKS = """
    import opkiln.compat.deepspeed as on_opkiln
    on_opkiln.install()
    import torch
    from deepspeed.ops.op_builder.transformer_inference import InferenceBuilder
    from deepspeed.ops.transformer.inference import op_binding as theirs
    from deepspeed.ops.transformer.inference.op_binding import (
        bias_add, bias_gelu, bias_relu, gated_activation, gelu_gemm, layer_norm, mlp_gemm,
        moe_res_matmul, pre_rms_norm, qkv_gemm, residual_add, rms_norm, softmax, vector_add,
        vector_matmul)
    from deepspeed.utils.types import ActivationFuncType as Activation

    ours = InferenceBuilder().load()
    answer = {{"origin": on_opkiln.served()["transformer_inference"].origin}}
    dtype, kind, unit = torch.{dtype}, "{kind}", {unit}
    torch.manual_seed(0)
    rows = lambda *shape: torch.randn(*shape or (2, 5, 64)).to(dtype)
    weight = lambda a, b: (torch.randn(a, b) / b**0.5).to(dtype)

    def compare(name, one, two, *args, units=1):
        # Each has tensors of its own: both may write to them.
        found = one(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
        expected = two(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
        if isinstance(found, torch.Tensor):
            found, expected = [found], [expected]
        answer[name] = len(found) == len(expected) and all(
            a.dtype == dtype and torch.allclose(a.float(), b.float(), rtol=units * unit,
                                                atol=units * unit)
            for a, b in zip(found, expected))

    x, r, a = rows(), rows(), rows()
    b, c, g, h = rows(64), rows(64), rows(64), rows(64)
    typed = lambda name: getattr(ours, name + "_" + kind)
    norms = layer_norm.LayerNormOp
    compare("layer_norm", ours.layer_norm, norms.layer_norm_fallback, x, g, h, 1e-5, units=2)
    compare("residual", ours._layer_norm_residual, norms.layer_norm_residual,
            x, b, r, g, h, 1e-5, units=4)
    compare("stored", ours.layer_norm_residual_store_pre_ln_res,
            norms.layer_norm_residual_store_pre_ln_res, x, b, r, g, h, 1e-5, units=4)
    compare("rms", ours.rms_norm, rms_norm.RMSNormOp.rms_norm_fallback, x, g, 1e-5, units=2)
    compare("pre_rms", ours.pre_rms_norm, pre_rms_norm.PreRMSNormOp.pre_rms_norm_fallback,
            x, r, g, 1e-5, units=4)
    compare("add", typed("bias_add"), bias_add.BiasAddOp.bias_add_fallback, x, b)
    compare("gelu", typed("bias_gelu"), bias_gelu.BiasGeluOp.bias_gelu_fallback, x, b)
    compare("relu", typed("bias_relu"), bias_relu.BiasReluOp.bias_relu_fallback, x, b)
    for kind_of_gate in (Activation.GATED_GELU, Activation.GATED_SILU):
        compare(kind_of_gate.name, ours.gated_activation,
                gated_activation.GatedActivationOp.gated_activation_fallback, x, b, kind_of_gate,
                units=4)
    for after, preln, bias in ((1, 1, 1), (1, 0, 1), (0, 1, 1), (0, 1, 0)):
        compare(f"residual_add {{after}} {{preln}} {{bias}}", typed("residual_add_bias"),
                residual_add.ResidualAddOp.residual_add_fallback,
                x, r, a, b, c, 2, bool(after), bool(bias), bool(preln), units=4)
    compare("vector_add", ours._vector_add, vector_add.VectorAddOp.vector_add_fallback, x, r, 0.5)
    compare("moe", ours.moe_res_matmul, moe_res_matmul.MoEResMatmulOp.moe_res_matmul_fallback,
            x, rows(1, 128, 1), r, units=4)
    scores, alibi, none = rows(1, 4, 5, 5), rows(4, 1, 5), torch.empty(1)
    for mask in (none, rows(1, 5), rows(1, 1, 5, 5)):
        for slopes in (none, alibi):
            for causal in (True, False):
                compare(f"softmax {{mask.dim()}} {{slopes.dim()}} {{causal}}", typed("softmax"),
                        softmax.SoftmaxOp.softmax_fallback, scores, mask, slopes, causal, False,
                        False, 1, False, 0.5, 0, 1, units=4)
    up, down, qkv = weight(64, 128), weight(128, 64), weight(64, 192)
    for transposed in (True, False):
        turned = [w.t().contiguous() if transposed else w for w in (up, down, qkv)]
        compare(f"qkv {{transposed}}", typed("qkv_gemm"), qkv_gemm.QKVGemmOp.qkv_gemm_fallback,
                x, turned[2], none, rows(192), g, h, 1e-5, True, False, transposed, units=8)
        compare(f"rms_qkv {{transposed}}", typed("rms_qkv_gemm"),
                qkv_gemm.QKVGemmOp.rms_qkv_gemm_fallback, x, turned[2], none, g, 1e-5, False,
                transposed, units=8)
        compare(f"matmul {{transposed}}", typed("vector_matmul"),
                lambda *args: vector_matmul.VectorMatMulOp.vector_matmul_fallback(None, *args),
                x, turned[0], False, none, False, transposed, units=8)
    compare("gelu_gemm", typed("fused_gemm_gelu"),
            lambda *args: gelu_gemm.GELUGemmOp.gelu_gemm_fallback(None, *args),
            x, up, none, rows(128), down, none, False, False, units=8)

    class PreNorm:
        pre_rms_norm = staticmethod(pre_rms_norm.PreRMSNormOp.pre_rms_norm_fallback)

    for gate in (Activation.GATED_GELU, Activation.GATED_SILU):
        compare(f"rms_mlp {{gate.name}}", typed("rms_mlp_gemm"),
                lambda *args: mlp_gemm.MLPGemmOp.rms_mlp_gemm_fallback(PreNorm(), *args),
                x, r, up, weight(64, 64), g, 1e-5, none, none, False, gate, False, units=8)
"""


@pytest.mark.parametrize(
    ("dtype", "kind", "unit"), [("float32", "fp32", 2e-6), ("bfloat16", "bf16", 2**-7)]
)
def test_pieces_of_inference_equal_deepspeeds_python_code(
    programs: Programs, dtype: str, kind: str, unit: float
) -> None:
    """DeepSpeed has a fallback in torch for most functions of its kernels."""
    found = programs.answer(FALLBACKS.format(dtype=dtype, kind=kind, unit=unit))
    assert found.pop("origin") == "ops"
    assert len(found) == 37
    assert [name for name, equal in found.items() if not equal] == []


def test_deepspeeds_inference_layers_generate_on_opkilns_kernels(programs: Programs) -> None:
    """Two layers see a prompt, then tokens. DeepSpeed's Python code serves the same layers; its
    gelu in the MLP is by erf, where DeepSpeed's kernels have it by tanh."""
    found = programs.answer(
        """
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        import types, torch
        from deepspeed.model_implementations.transformers.ds_transformer import (
            DeepSpeedTransformerInference as Layer)
        from deepspeed.ops.op_builder.transformer_inference import InferenceBuilder
        from deepspeed.ops.transformer.inference.config import DeepSpeedInferenceConfig
        from deepspeed.ops.transformer.inference.ds_attention import DeepSpeedSelfAttention
        from deepspeed.ops.transformer.inference.op_binding.base import BaseOp

        def generated(module):
            BaseOp.inference_module = module
            Layer.layer_id, Layer.workspace, DeepSpeedSelfAttention.num_layers = 0, None, 0
            torch.manual_seed(0)
            layers = []
            for _ in range(2):
                layers.append(Layer(DeepSpeedInferenceConfig(
                    hidden_size=64, intermediate_size=128, heads=4, num_hidden_layers=2,
                    layer_norm_eps=1e-5, dtype=torch.float32, max_out_tokens=16,
                    return_tuple=False)))
                for p in layers[-1].parameters():
                    p.data.normal_(std=0.1)
            outs = []
            for tokens in (5, 1, 1, 1):
                x = torch.randn(2, tokens, 64)
                for layer in layers:
                    x = layer(x)
                outs.append(x)
            return torch.cat(outs, 1)

        ours = generated(InferenceBuilder().load())
        theirs = generated(types.SimpleNamespace())
        answer = [(ours - theirs).abs().max().item(), theirs.abs().max().item(),
                  on_opkiln.served()["transformer_inference"].origin]
        """
    )
    assert found[0] < 2e-3 < 1 < found[1]
    assert found[2] == "ops"


def test_fastgens_pieces_run_on_opkilns_kernels(programs: Programs) -> None:
    """FastGen takes its builder from DeepSpeed's list for GPUs: here it is given by hand."""
    found = programs.answer(
        """
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        import deepspeed, torch
        from deepspeed.ops import op_builder
        from deepspeed.ops.op_builder.inference_core_ops import InferenceCoreBuilder
        from torch.nn import functional as F
        op_builder.InferenceCoreBuilder = InferenceCoreBuilder
        from deepspeed.inference.v2.inference_utils import ActivationType
        from deepspeed.inference.v2.kernels.core_ops import (
            BlasLibLinear, CUDABiasActivation, CUDAFPLN, CUDAFPPostLN, CUDAFPPreLN,
            CUDAGatedActivation, CUDARMSNorm, CUDARMSPreNorm)

        torch.manual_seed(0)
        dtype, rows = torch.bfloat16, (6, 64)
        x, y, g, b = (torch.randn(*s).to(dtype) for s in (rows, rows, rows[1:], rows[1:]))
        near = lambda one, two: torch.allclose(one.double(), two, rtol=2**-6, atol=2**-6)
        wide = lambda *tensors: [t.double() for t in tensors]
        X, Y, G, B = wide(x, y, g, b)
        norm = lambda t: F.layer_norm(t, (64,), G, B, 1e-5)
        rms = lambda t: F.rms_norm(t, (64,), G, 1e-5)
        empty = lambda: torch.empty_like(x)
        answer = []
        answer.append(near(CUDAFPLN(64, dtype)(empty(), x, g, b), norm(X)))
        answer.append(near(CUDAFPPostLN(64, dtype)(empty(), x, y, g, b), norm(X + Y)))
        total, out = CUDAFPPreLN(64, dtype)(empty(), empty(), x, y, g, b)
        answer += [near(total, X + Y), near(out, norm(X + Y))]
        answer.append(near(CUDARMSNorm(64, dtype)(empty(), x, g), rms(X)))
        total, out = CUDARMSPreNorm(64, dtype)(empty(), empty(), x, y, g)
        answer += [near(total, X + Y), near(out, rms(X + Y))]
        changed = x.clone()
        CUDABiasActivation(64, dtype, ActivationType.SILU)(changed, b)
        answer.append(near(changed, F.silu(X + B)))
        gated = torch.empty(6, 32, dtype=dtype)
        CUDAGatedActivation(32, dtype, ActivationType.SiGLU)(gated, x, b)
        both = X + B
        answer.append(near(gated, F.silu(both[:, 0::2]) * both[:, 1::2]))
        weight = (torch.randn(32, 64) / 8).to(dtype)
        answer.append(near(BlasLibLinear(dtype)(gated, x, weight), X @ weight.double().t()))
        answer.append(on_opkiln.served()["inference_core_ops"].origin)
        """
    )
    assert found == [True] * 10 + ["ops"]
