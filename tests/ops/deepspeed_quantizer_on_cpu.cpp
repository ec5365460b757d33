// deepspeed_quantizer's CUDA kernels, run on the CPU: the file itself, on what stands in for CUDA's
// runtime. Called from Python with ctypes (test_deepspeed_quantizer.py).

#include <ops/deepspeed_quantizer/cuda.cu>

using namespace opkiln;
using namespace opkiln::deepspeed_quantizer;

extern "C" {

struct Call {
  void *levels, *params;
  int64_t groups, size, bits, symmetric;
  void *from, *out;
  int64_t type, with_zero;
  int64_t nodes, devices, pipeline, piece;
  void *part_levels, *part_params;
  int64_t part_groups, part_size, parts;
};

int run(const Call* call, int back) {
  const auto groups = [&](void* levels, void* params, int64_t count, int64_t size) {
    return Groups{static_cast<uint8_t*>(levels), static_cast<float*>(params), count, size,
                  static_cast<int>(call->bits), call->symmetric != 0};
  };
  Work work{};
  work.to = groups(call->levels, call->params, call->groups, call->size);
  work.from = call->from;
  work.out = call->out;
  work.type = static_cast<ElementType>(call->type);
  work.with_zero = call->with_zero != 0;
  work.order = {static_cast<uint32_t>(call->nodes), static_cast<uint32_t>(call->devices),
                static_cast<uint32_t>(call->pipeline), static_cast<uint32_t>(call->piece)};
  work.parts =
      groups(call->part_levels, call->part_params, call->part_groups, call->part_size);
  work.number_of_parts = static_cast<int>(call->parts);
  const char* const error =
      back ? enqueue_dequantize(work, nullptr) : enqueue_quantize(work, nullptr);
  return error == nullptr ? 0 : 1;
}
}
