"""The builder and the schemas of ``fused_lamb``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.ops.optimizing.builders import FusedBuilder, fused_schemas

# The halves of a step of tensors that several ranks share. Between them `squares`, the sums of
# squares of each parameter and its update, is added up over the ranks.
_AVERAGE = (
    "fused_lamb_average_(Tensor[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor[] masters, Tensor[] steps, Tensor(f!) squares, "
    "float beta1, float beta2, float eps, float weight_decay, bool eps_inside_sqrt, "
    "bool bias_correction, bool maximize, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
)
_MOVE = (
    "fused_lamb_move_(Tensor(a!)[] params, Tensor[] grads, Tensor[] exp_avgs, "
    "Tensor[] exp_avg_sqs, Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor squares, "
    "Tensor(f!) coefficients, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool eps_inside_sqrt, bool bias_correction, float min_coeff, "
    "float max_coeff, Tensor? lr_tensor=None, Tensor? found_inf=None) -> ()"
)


class FusedLambBuilder(FusedBuilder):
    """``load()`` gives ``fused_lamb_`` (see reference.py), its halves and, on GPUs, its planned
    form."""

    NAME = "fused_lamb"
    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    # `coefficients` receives a number per parameter.
    SCHEMAS = (
        *fused_schemas(
            "fused_lamb",
            ("exp_avgs", "exp_avg_sqs"),
            "Tensor(f!) coefficients, float lr, float beta1, float beta2, float eps, "
            "float weight_decay, bool eps_inside_sqrt, bool bias_correction, bool maximize, "
            "float min_coeff, float max_coeff",
        ),
        _AVERAGE,
        _MOVE,
    )
