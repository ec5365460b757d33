// Shared by the kernels of both directions: a call's sizes, rules and
// list of tiles, with the argument checks.
#pragma once

#include <opkiln/op.h>

// Hidden: libraries in one process share nothing.
namespace sparse __attribute__((visibility("hidden"))) {

struct Strides {
  int64_t batch, head, token;
};

// All tensors are [batch, heads, tokens, columns].
struct Sizes {
  int32_t batch, heads, tokens, columns;
  int32_t layout_heads;  // 1: all heads share a layout
};

// Which keys a query sees within its blocks, and what is added to their scores.
struct Rules {
  const float* key_bias;  // [batch, tokens]; may be null
  const void* mask;
  Strides mask_strides;  // rows have stride 1
  bool multiply;  // keys are hidden where the mask is 0; otherwise the mask is added
  int32_t least, most;  // a key is visible if least <= query - key <= most
  float scale;
  bool biased;  // there is a mask or a key_bias
};

// One of the lists that plans.py builds.
struct List {
  const int32_t *shares, *tiles, *joined;
  int32_t share_count, joined_count;
  int32_t slots;  // slots of shares that are joined
  int32_t lines;  // lines per head
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;
using MaybeTensor = opk::optional<Tensor>;

constexpr int32_t kFar = 1 << 30;

inline Strides strides_of(const Tensor& x) {
  return {x.stride(0), x.stride(1), x.stride(2)};
}

// Checks the layout against q, which has four dimensions.
inline Sizes sizes_of(const Tensor& q, const Tensor& layout, int64_t block) {
  opk::check_dim(q, 4);
  opk::check_dim(layout, 3);
  opk::check_contiguous(layout);
  opk::check_dtype(layout, opk::DType::bool_);
  opk::check_same_device(q, layout);
  OPK_CHECK(block == 16 || block == 32 || block == 64 || block == 128, "block is ", block,
            ", expected 16, 32, 64 or 128");
  const int64_t blocks = (q.size(2) + block - 1) / block;
  OPK_CHECK((layout.size(0) == 1 || layout.size(0) == q.size(1)) && layout.size(1) == blocks &&
                layout.size(2) == blocks,
            layout, " has shape ", layout.sizes(), ", expected [", q.size(1), " or 1, ", blocks, ", ", blocks, "]");
  OPK_CHECK(q.size(2) < kFar && q.size(0) * q.size(1) < kFar, q, " has shape ", q.sizes(), ", which is too large");
  Sizes out;
  out.batch = static_cast<int32_t>(q.size(0));
  out.heads = static_cast<int32_t>(q.size(1));
  out.tokens = static_cast<int32_t>(q.size(2));
  out.columns = static_cast<int32_t>(q.size(3));
  out.layout_heads = static_cast<int32_t>(layout.size(0));
  return out;
}

inline Rules rules_of(const Tensor& q, const MaybeTensor& key_bias, const MaybeTensor& mask, double scale, bool causal,
                      int64_t window, bool multiply) {
  OPK_CHECK(scale > 0, "scale is ", scale, ", expected more than 0");
  OPK_CHECK(window >= 0, "window is ", window, ", expected at least 0");
  Rules out = {};
  if (key_bias.has_value()) {
    opk::check_dtype(*key_bias, opk::DType::float32);
    opk::check_shape(*key_bias, {q.size(0), q.size(2)});
    opk::check_contiguous(*key_bias);
    opk::check_same_device(q, *key_bias);
    out.key_bias = key_bias->data<const float>();
  }
  if (mask.has_value()) {
    opk::check_same_dtype(q, *mask);
    opk::check_shape(*mask, {q.size(0), q.size(1), q.size(2), q.size(2)});
    OPK_CHECK(mask->stride(3) == 1 || q.size(2) <= 1, *mask, " has rows with gaps");
    opk::check_same_device(q, *mask);
    out.mask = mask->data();
    out.mask_strides = strides_of(*mask);
    out.multiply = multiply;
  }
  const int32_t near = static_cast<int32_t>(window > 0 && window < kFar ? window - 1 : kFar);
  out.least = causal ? 0 : -near;
  out.most = near;
  out.scale = static_cast<float>(scale);
  out.biased = key_bias.has_value() || mask.has_value();
  return out;
}

// The list that begins at `first` of the nine tensors. Its lines have `rows` tokens.
inline List list_of(const opk::TensorList& lists, int first, const Sizes& sizes, int rows) {
  OPK_CHECK(lists.size() == 9, "lists has ", static_cast<int64_t>(lists.size()), " tensors, expected 9");
  const Tensor &shares = lists[first], &tiles = lists[first + 1], &joined = lists[first + 2];
  const Tensor* const all[] = {&shares, &tiles, &joined};
  for (const Tensor* each : all) {
    opk::check_dtype(*each, opk::DType::int32);
    opk::check_dim(*each, 2);
    opk::check_contiguous(*each);
  }
  OPK_CHECK(shares.size(1) == 4 && tiles.size(1) == 2 && joined.size(1) == 4, "lists has rows of another length");
  List out;
  out.shares = shares.data<const int32_t>();
  out.tiles = tiles.data<const int32_t>();
  out.joined = joined.data<const int32_t>();
  out.share_count = static_cast<int32_t>(shares.size(0));
  out.joined_count = static_cast<int32_t>(joined.size(0));
  out.lines = (sizes.tokens + rows - 1) / rows;
  // Each line is either one share, or joined from slots.
  out.slots = out.share_count - out.lines * sizes.layout_heads + out.joined_count;
  OPK_CHECK(out.slots >= 0, "lists was built for another layout");
  return out;
}

// The number of thread blocks per share.
inline int64_t times(const Sizes& sizes) {
  return int64_t{sizes.batch} * (sizes.layout_heads == 1 ? sizes.heads : 1);
}

// Rows are read 16 bytes at a time.
inline void check_rows(const Tensor& x, const Tensor& q) {
  opk::check_same_shape(x, q);
  opk::check_same_dtype(x, q);
  opk::check_same_device(x, q);
  OPK_SERVED((x.stride(3) == 1) && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0 && x.stride(2) % 8 == 0 &&
                 reinterpret_cast<uintptr_t>(x.data()) % 16 == 0,
             x, " has rows that do not begin at multiples of 16 bytes");
  OPK_SERVED(x.stride(2) < (int64_t{1} << 31), x, " has rows that are too far apart");
}

inline void check_head(const Sizes& sizes) {
  OPK_SERVED(sizes.columns % 8 == 0 && sizes.columns <= 128, "heads have ", int64_t{sizes.columns},
             " elements, the kernel takes multiples of 8 up to 128");
}

OPK_PLAIN_END
#endif

}  // namespace sparse
