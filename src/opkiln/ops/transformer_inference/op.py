"""The fused pieces of a decoder: norms, activations, residual adds."""

from __future__ import annotations

from opkiln.builder.library import Library, library


# One for each family and dtype, so that a process waits for what it calls alone.
def _family(name: str, functions: str = "") -> Library:
    """The functions whose sources are called like them."""
    return library(
        f"transformer_inference__{name}",
        f"{name}.cpp",
        cuda=f"{name}.cu",
        namespace="opkiln",
        functions=f"opkiln.ops.transformer_inference.functions.{functions or name}",
        dtypes=("float32", "bfloat16", "float16"),
    )


norms = _family("norms")
activations = _family("activations")
residuals = _family("residuals")
rotary = _family("rotary")
softmax = _family("softmax")
int8_linear = _family("int8_linear", functions="linear")
kit = library(
    "transformer_inference", parts=(norms, activations, residuals, rotary, softmax, int8_linear)
)
