#include <opkiln/op.h>

#include <stdexcept>

#include "more.h"

using opk::List;
using opk::optional;
using opk::Tensor;

namespace {

// What a test changes to tell one build from another.
constexpr int64_t kWho = 1;

int64_t who(const Tensor&) {
  return kWho;
}

void scale_(Tensor& x, double by) {
  opk::check_contiguous(x);
  OPK_DISPATCH(x, T, (float, double, opk::half, opk::bfloat16), {
    T* const data = x.data<T>();
    for (int64_t i = 0; i < x.numel(); ++i) data[i] = static_cast<T>(data[i] * by);
  });
}

void scale_each_(List<Tensor>& xs, double by) {
  for (Tensor& x : xs) scale_(x, by);
}

bool maybe_fill_(const Tensor&, optional<Tensor>& x, double value) {
  if (!x) return false;
  for (int64_t i = 0; i < x->numel(); ++i) x->data<float>()[i] = static_cast<float>(value);
  return true;
}

Tensor sum_all(const opk::TensorList& xs, const optional<Tensor>& bias) {
  OPK_CHECK(!xs.empty(), "xs is empty");
  Tensor out = opk::zeros(xs[0].sizes(), xs[0]);
  float* const o = out.data<float>();
  for (const Tensor& x : xs) {
    for (int64_t i = 0; i < out.numel(); ++i) o[i] += x.data<const float>()[i];
  }
  for (int64_t i = 0; bias && i < out.numel(); ++i) o[i] += bias->data<const float>()[0];
  return out;
}

opk::tuple<int64_t, double, bool> numbers(const Tensor&, int64_t i, double f, bool b) {
  return {i, f, b};
}

opk::tuple<List<int64_t>, List<double>, List<bool>, List<opk::String>> lists(const Tensor&, const List<int64_t>& i, List<double> f, const List<bool>& b, List<opk::String> s) {
  return {i, f, b, s};
}

opk::tuple<optional<int64_t>, optional<double>, optional<bool>, optional<opk::String>,
           optional<List<int64_t>>>
optionals(const Tensor&, optional<int64_t> i, const optional<double>& f, optional<bool> b,
          const optional<opk::String>& s, const optional<List<int64_t>>& l) {
  return {i, f, b, s, l};
}

opk::DType same_dtype(const Tensor&, opk::DType dtype) {
  return dtype;
}

opk::Device same_device(const Tensor&, opk::Device device) {
  return device;
}

Tensor make(const Tensor&, const List<int64_t>& size, opk::DType dtype, opk::Device device) {
  return opk::empty(size, dtype, device);
}

opk::tuple<List<int64_t>, List<int64_t>, int64_t, opk::DType, opk::Device, bool> describe(
    const Tensor& x) {
  List<int64_t> sizes(x.dim()), strides(x.dim());
  for (int64_t i = 0; i < x.dim(); ++i) {
    sizes[i] = x.size(i);
    strides[i] = x.stride(i - x.dim());
  }
  return {sizes, strides, x.storage_offset(), x.dtype(), x.device(), x.is_contiguous()};
}

opk::tuple<Tensor, List<Tensor>> split(const Tensor& x) {
  List<Tensor> rows(x.size(0));
  for (int64_t i = 0; i < x.size(0); ++i) {
    rows[i] = opk::call("aten::select", "int", x, 0, i);
    rows[i] = opk::call("aten::clone", "", rows[i], opk::none);
  }
  return {opk::empty_like(x), rows};
}

Tensor like(const Tensor& x) {
  return opk::empty_like(x);
}

Tensor dense(const Tensor& x) {
  return opk::call("aten::clone", "", opk::contiguous(x), opk::none);
}

Tensor doubled(const Tensor& x) {
  const Tensor from = opk::contiguous(x);
  Tensor out = opk::empty(x.sizes(), x);
  OPK_DISPATCH(x.dtype(), T, (float, double, opk::half, opk::bfloat16, int32_t, int64_t, uint8_t), {
    for (int64_t i = 0; i < x.numel(); ++i) {
      out.data<T>()[i] = static_cast<T>(from.data<const T>()[i] * 2);
    }
  });
  return out;
}

Tensor through_torch(const Tensor& x, int64_t dim) {
  List<int64_t> dims = {dim};
  return opk::call("aten::sum", "dim_IntList", opk::call("aten::relu", "", x),
                   optional<List<int64_t>>(dims), true, opk::none);
}

opk::tuple<Tensor, Tensor> topk(const Tensor& x, int64_t k) {
  return opk::call<opk::tuple<Tensor, Tensor>>("aten::topk", "", x, k, -1, true, true);
}

Tensor refused_by_torch(const Tensor& x) {
  return opk::call("aten::mm", "", x, x);
}

void fail_in_part(const Tensor&, int64_t at) {
  opk::parallel_for(0, 1000, 1, [=](int64_t begin, int64_t end) {
    if (begin <= at && at < end) throw std::runtime_error("the part with the number failed");
  });
}

int64_t threads(const Tensor&) {
  OPK_CHECK(opk::thread_index() == 0);
  return opk::num_threads();
}

void check(const Tensor& x, const Tensor& y, const opk::String& what) {
  if (what == "shape") opk::check_same_shape(x, y);
  if (what == "dtype") opk::check_same_dtype(x, y);
  if (what == "contiguous") opk::check_contiguous(x, y);
  if (what == "dim") opk::check_dim(y, 3);
  if (what == "exact") opk::check_shape(y, {2, -1});
  if (what == "data") (void)y.data<const float>();
  if (what == "size") (void)y.size(7);
  if (what == "dispatch") OPK_DISPATCH(y, T, (float, opk::half), (void)sizeof(T));
  if (what == "device") opk::check_same_device(x, opk::call("aten::empty_like", "", y, opk::none, opk::none,
      optional<opk::Device>(opk::Device{opk::DeviceType::meta, -1}), opk::none, opk::none));
  if (what == "parts") opk::raise(x, " ", 1, " ", 2.5, " ", true, " ", x.dtype(), " ", x.device(), " ", x.sizes());
  if (what == "long") {
    for (int64_t i = 0; i < 1; ++i) opk::raise(List<int64_t>(500), " and more");
  }
  if (what == "none") (void)*optional<int64_t>();
  if (what == "item") (void)List<int64_t>(2)[2];
  if (what == "undefined") (void)Tensor().numel();
  if (what == "negative") (void)opk::empty({2, -3}, x);
}

void item_check(const List<Tensor>& xs) {
  for (const Tensor& x : xs) opk::check_same_shape(xs[0], x);
}

void unmet(const Tensor&, int64_t k) {
  OPK_CHECK(k > 0);
}

void standard_error(const Tensor&) {
  throw std::logic_error("a standard error");
}

}  // namespace

OPKILN_OP(who, cpu);
OPKILN_OP(scale_, cpu);
OPKILN_OP(scale_each_, cpu);
OPKILN_OP(maybe_fill_, cpu);
OPKILN_OP(sum_all, cpu);
OPKILN_OP(numbers, cpu);
OPKILN_OP(lists, cpu);
OPKILN_OP(optionals, cpu);
OPKILN_OP(texts::twice, cpu);
OPKILN_OP(same_dtype, cpu);
OPKILN_OP(same_device, cpu);
OPKILN_OP(make, cpu);
OPKILN_OP(describe, cpu);
OPKILN_OP(split, cpu);
OPKILN_OP(like, cpu);
OPKILN_OP(dense, cpu);
OPKILN_OP(doubled, cpu);
OPKILN_OP(through_torch, cpu);
OPKILN_OP(topk, cpu);
OPKILN_OP(refused_by_torch, cpu);
OPKILN_OP(fail_in_part, cpu);
OPKILN_OP(threads, cpu);
OPKILN_OP(check, cpu);
OPKILN_OP(item_check, cpu);
OPKILN_OP(unmet, cpu);
OPKILN_OP(standard_error, cpu);
