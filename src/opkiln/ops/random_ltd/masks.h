// Shared by the CPU and CUDA versions for attention masks: argument checks, and the op's functions.
#pragma once

#include "indices.h"

namespace {

struct Masks {
  const char* mask;  // [B, H, S, S], with stride 1 in the last dimension
  char* out;         // [L, B, H, K, K], contiguous
  Indices indices;   // [L, B, K]; null data: the first K tokens
  int64_t layers, batch, heads, kept, tokens;
  int64_t batch_step, head_step, row_step;  // strides of the mask, in elements
  int64_t size;                             // bytes per element
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;

// Defined by each device's source. Called only if the result has elements.
void gather_masks(const Masks& masks);

Masks masks_of(const Tensor& mask) {
  opk::device_of(mask);
  OPK_CHECK(mask.dim() == 4 && mask.size(2) == mask.size(3), mask, " has shape ", mask.sizes(),
            ", expected [batch, heads, tokens, tokens]");
  Masks masks{};
  masks.layers = 1;
  masks.batch = mask.size(0);
  masks.heads = mask.size(1);
  masks.tokens = mask.size(2);
  masks.size = mask.element_size();
  return masks;
}

void set_mask(Masks& masks, const Tensor& mask) {
  masks.mask = static_cast<const char*>(mask.data());
  masks.batch_step = mask.stride(0);
  masks.head_step = mask.stride(1);
  masks.row_step = mask.stride(2);
}

Tensor make_mask_readable(const Tensor& mask) {
  return mask.size(3) <= 1 || mask.stride(3) == 1 ? mask : opk::contiguous(mask);
}

Tensor mask_gather_bert(const Tensor& mask, const Tensor& indices) {
  Masks masks = masks_of(mask);
  check_indices(indices);
  OPK_CHECK(indices.dim() == 3 && indices.size(1) == masks.batch, indices, " has shape ",
            indices.sizes(), ", expected [layers, ", masks.batch, ", kept]");
  opk::check_same_device(mask, indices);
  const Tensor picked = opk::contiguous(indices), given = make_mask_readable(mask);
  masks.layers = indices.size(0);
  masks.kept = indices.size(2);
  masks.indices = indices_of(picked);
  set_mask(masks, given);
  Tensor out = opk::empty({masks.layers, masks.batch, masks.heads, masks.kept, masks.kept}, mask);
  masks.out = static_cast<char*>(out.data());
  if (out.numel() > 0) gather_masks(masks);
  return out;
}

Tensor mask_gather_gpt(const Tensor& mask, int64_t kept) {
  Masks masks = masks_of(mask);
  OPK_CHECK(kept >= 0, "kept is ", kept, ", expected at least 0");
  OPK_CHECK(kept <= masks.tokens, "kept is ", kept, ", but mask is for ", masks.tokens, " tokens");
  const Tensor given = make_mask_readable(mask);
  masks.kept = kept;
  set_mask(masks, given);
  Tensor out = opk::empty({masks.batch, masks.heads, kept, kept}, mask);
  masks.out = static_cast<char*>(out.data());
  if (out.numel() > 0) gather_masks(masks);
  return out;
}

OPK_PLAIN_END
#endif

}  // namespace
