// A fused optimizer's lists of tensors, and the checks that its CPU and GPU versions share.
#pragma once

#include "tensors.h"

#if !defined(__CUDACC_RTC__)

OPK_PLAIN_BEGIN
namespace opkiln __attribute__((visibility("hidden"))) {

struct Lists {
  const TensorList &params, &grads, &exp_avgs;
  const TensorList* exp_avg_sqs;  // null if the optimizer has only one state
  const TensorList &masters, &steps;

  // Checks the lengths of the lists.
  void check() const {
    check_length("grads", grads, params);
    check_length("exp_avgs", exp_avgs, params);
    if (exp_avg_sqs) {
      check_length("exp_avg_sqs", *exp_avg_sqs, params);
    }
    if (!masters.empty()) {
      check_length("masters", masters, params);
    }
    if (steps.size() != 1) {
      check_length("steps", steps, params);
    }
  }

  bool has_master(int64_t i) const {
    return !masters.empty() && masters[i].numel() != 0;
  }

  Stream master(const Model& model, int64_t i) const {
    if (model.type() == ElementType::kFloat) {
      raise_form("%s is given, but %s has dtype float32: expected an empty tensor", NameOf(masters[i]).text,
                 NameOf(params[i]).text);
    }
    return model.floats(masters[i]);
  }
};

// Raises unless the tensor is one number of an expected dtype on the device.
[[gnu::noinline]] inline void check_number(const Tensor& tensor, opk::Device device,
                                           bool or_double = false) {
  opk::check_on(tensor, device);
  const DType type = tensor.dtype();
  if (type != DType::float32 && !(or_double && type == DType::float64)) {
    raise_form("%s has dtype %s, expected %s", NameOf(tensor).text, name_of(type),
               or_double ? "float32 or float64" : "float32");
  }
  if (tensor.numel() != 1) {
    raise_form("%s has %lld elements, expected one", NameOf(tensor).text,
               static_cast<long long>(tensor.numel()));
  }
}

// Raises unless the tensor is contiguous and has `count` numbers of this dtype on the device.
[[gnu::noinline]] inline void check_numbers(const Tensor& tensor, DType dtype, int64_t count,
                                            opk::Device device) {
  opk::check_on(tensor, device);
  if (tensor.dtype() != dtype || !tensor.is_contiguous() || tensor.numel() != count) {
    raise_form("%s has dtype %s and %lld elements, expected %s and %lld, contiguous", NameOf(tensor).text,
               name_of(tensor.dtype()), static_cast<long long>(tensor.numel()), name_of(dtype),
               static_cast<long long>(count));
  }
}

// Whether an address appears twice.
inline bool repeats(const opk::List<float*>& addresses) {
  int64_t room = 1;
  while (room < 2 * addresses.size()) {
    room *= 2;
  }
  opk::List<float*> seen(room);  // a hash table with linear probing
  for (float* const address : addresses) {
    auto at = static_cast<int64_t>(reinterpret_cast<uint64_t>(address) * 0x9e3779b97f4a7c15 >> 20);
    for (at &= room - 1; seen.data()[at]; at = (at + 1) & (room - 1)) {
      if (seen.data()[at] == address) {
        return true;
      }
    }
    seen.begin()[at] = address;
  }
  return false;
}

// The addresses of the step counts. All must differ: a shared count would be incremented twice.
inline opk::List<float*> step_pointers(const TensorList& steps, opk::Device device) {
  opk::List<float*> out(steps.size());
  for (int64_t i = 0; i < out.size(); ++i) {
    check_number(steps[i], device);
    out[i] = static_cast<float*>(mutable_data(steps[i]));
  }
  if (out.size() > 1 && repeats(out)) {
    raise_form("steps has a tensor twice, expected one for all parameters or one for each");
  }
  return out;
}

}  // namespace opkiln
OPK_PLAIN_END

#endif
