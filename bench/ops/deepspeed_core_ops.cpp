// The kernels of DeepSpeed's inference_core_ops that a benchmark calls, under DeepSpeed's names.
// Its own binding also has fp6 matrix products, whose one source takes minutes to compile.

#include <torch/extension.h>

#include "bias_activation.h"
#include "gated_activation_kernels.h"
#include "layer_norm.h"
#include "rms_norm.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("bias_activation", &bias_activation);
    module.def("gated_activation", &ds_gated_activation);
    module.def("layer_norm", &ds_layer_norm);
    module.def("rms_norm", &rms_norm);
    module.def("rms_pre_norm", &rms_pre_norm);
}
