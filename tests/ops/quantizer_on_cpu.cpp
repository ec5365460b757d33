// quantizer's CUDA kernels, run on the CPU: the files themselves, on what stands in for CUDA's
// runtime. Called from Python with ctypes (quantizer_kernel.py).

#include <ops/quantizer/cuda.cu>
#include <ops/quantizer/cuda_float.cu>

using namespace opkiln;
using namespace opkiln::quantizer;

extern "C" {

struct Call {
  int64_t numel, type;
  void *from, *error, *out, *values, *scales, *offsets;
  int64_t bits, group_size, symmetric, full;
  int64_t nodes, devices, pipeline, piece;
  int64_t stochastic, seed, offset;
  void* offset_at;
  int64_t from_bits, from_group_size, from_symmetric;
  double factor;
  int64_t parts;
  void **part_values, **part_scales, **part_offsets;
};

int run(const Call* call, int back) {
  Work work{};
  work.numel = call->numel;
  work.type = static_cast<ElementType>(call->type);
  work.from = call->from;
  work.error = static_cast<float*>(call->error);
  work.out = call->out;
  work.to = {static_cast<uint8_t*>(call->values), static_cast<float*>(call->scales),
             static_cast<float*>(call->offsets)};
  work.format = {static_cast<int>(call->bits), static_cast<int>(call->group_size),
                 call->symmetric != 0, call->full != 0};
  work.order = {static_cast<uint32_t>(call->nodes), static_cast<uint32_t>(call->devices),
                static_cast<uint32_t>(call->pipeline), static_cast<uint32_t>(call->piece)};
  work.random = {call->stochastic != 0, static_cast<uint64_t>(call->seed),
                 static_cast<uint64_t>(call->offset), static_cast<int64_t*>(call->offset_at)};
  Parts parts{};
  parts.count = static_cast<int>(call->parts);
  parts.factor = static_cast<float>(call->factor);
  parts.format = {static_cast<int>(call->from_bits), static_cast<int>(call->from_group_size),
                  call->from_symmetric != 0, false};
  for (int i = 0; i < parts.count; ++i) {
    parts.at[i] = {static_cast<uint8_t*>(call->part_values[i]),
                   static_cast<float*>(call->part_scales[i]),
                   call->from_symmetric ? nullptr : static_cast<float*>(call->part_offsets[i])};
  }
  const char* const error =
      back ? enqueue_dequantize(work, nullptr) : enqueue_quantize(work, parts, nullptr);
  return error == nullptr ? 0 : 1;
}
}
