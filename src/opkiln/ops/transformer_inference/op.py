"""The libraries of ``transformer_inference``: one for each family of functions and each dtype, so
that a process waits for what it calls alone. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.authoring.library import Library, library

_ROTARY = (
    "Tensor? positions=None, Tensor? cos=None, Tensor? sin=None, SymInt dim=0, "
    "float theta=10000.0, bool interleaved=False, bool inverse=False"
)
_SOFTMAX = (
    "Tensor? mask=None, Tensor? slopes=None, float scale=1.0, bool causal=False, "
    "SymInt offset=0, SymInt window=0"
)


def _family(name: str, *schemas: str, functions: str = "") -> Library:
    """The functions whose sources are called like them."""
    return library(
        f"transformer_inference__{name}",
        f"{name}.cpp",
        cuda=f"{name}.cu",
        namespace="opkiln",
        functions=f"opkiln.ops.transformer_inference.functions.{functions or name}",
        dtypes=("float32", "bfloat16", "float16"),
        schemas=schemas,
    )


norms = _family(
    "norms",
    "rms_norm(Tensor x, Tensor? weight=None, float eps=1e-06) -> Tensor",
    "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor",
    (
        "pre_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? input_bias=None, "
        "float eps=1e-06) -> (Tensor, Tensor)"
    ),
    (
        "pre_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, "
        "Tensor? input_bias=None, float eps=1e-05) -> (Tensor, Tensor)"
    ),
    (
        "post_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, "
        "Tensor? input_bias=None, float eps=1e-06) -> Tensor"
    ),
    (
        "post_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, "
        "Tensor? input_bias=None, float eps=1e-05) -> Tensor"
    ),
)
activations = _family(
    "activations",
    "bias_add(Tensor x, Tensor? bias=None) -> Tensor",
    "bias_relu(Tensor x, Tensor? bias=None) -> Tensor",
    "bias_silu(Tensor x, Tensor? bias=None) -> Tensor",
    "bias_gelu(Tensor x, Tensor? bias=None, bool tanh=True) -> Tensor",
    (
        "gated_silu(Tensor x, Tensor? bias=None, bool interleaved=False, "
        "bool gate_first=True) -> Tensor"
    ),
    (
        "gated_gelu(Tensor x, Tensor? bias=None, bool tanh=True, bool interleaved=False, "
        "bool gate_first=True) -> Tensor"
    ),
)
residuals = _family(
    "residuals",
    (
        "residual_add(Tensor hidden, Tensor residual, Tensor? attention=None, "
        "Tensor? bias=None, Tensor? attention_bias=None, float scale=1.0, "
        "float attention_scale=1.0) -> Tensor"
    ),
    "moe_res_matmul(Tensor residual, Tensor coef, Tensor mlp) -> Tensor",
)
rotary = _family(
    "rotary",
    f"rotary(Tensor x, {_ROTARY}) -> Tensor",
    f"rotary_(Tensor(a!) x, {_ROTARY}) -> ()",
    f"rotary_qk(Tensor q, Tensor k, {_ROTARY}) -> (Tensor, Tensor)",
    f"rotary_qk_(Tensor(a!) q, Tensor(b!) k, {_ROTARY}) -> ()",
)
softmax = _family(
    "softmax",
    f"softmax(Tensor x, {_SOFTMAX}) -> Tensor",
    f"softmax_(Tensor(a!) x, {_SOFTMAX}) -> ()",
)
int8_linear = _family(
    "int8_linear",
    "dequantize_int8(Tensor weight, Tensor scales, ScalarType dtype) -> Tensor",
    "int8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None) -> Tensor",
    functions="linear",
)
kit = library(
    "transformer_inference", parts=(norms, activations, residuals, rotary, softmax, int8_linear)
)
