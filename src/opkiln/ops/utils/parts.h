// Shared by the CPU and CUDA versions: argument checks, and the op's functions.
#pragma once

#include <opkiln/arguments.h>

namespace {

// A range of bytes to copy.
struct Part {
  const char* from;
  char* to;
  int64_t bytes;
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;
using opk::TensorList;
using Parts = opk::List<Part>;

// Defined by each device's source.
void copy(const Parts& parts);

void check_alike(const Tensor& tensor, const Tensor& first, opk::Device device, opk::DType dtype) {
  opk::check_on(tensor, device);
  if (tensor.dtype() != dtype) {
    opk::raise(tensor, " has dtype ", tensor.dtype(), ", expected that of ", first, ", ", dtype);
  }
}

// The number of elements in the list. Checks that all tensors have one dtype and are on the op's device.
int64_t check_and_count(const TensorList& tensors) {
  OPK_CHECK(!tensors.empty(), "tensors is empty, expected at least one");
  const opk::Device device = opk::device_of(tensors[0]);
  const opk::DType dtype = tensors[0].dtype();
  int64_t count = 0;
  for (const Tensor& tensor : tensors) {
    check_alike(tensor, tensors[0], device, dtype);
    count += tensor.numel();
  }
  return count;
}

// Copies the list into a new flat tensor.
Tensor flatten_list(const TensorList& tensors) {
  Tensor flat = opk::empty({check_and_count(tensors)}, tensors[0]);
  const int64_t size = flat.element_size();
  TensorList without_gaps(tensors.size());
  Parts parts(tensors.size());
  char* to = static_cast<char*>(flat.data());
  for (int64_t i = 0; i < tensors.size(); ++i) {
    const Tensor* from = &tensors[i];
    if (!from->is_contiguous()) {
      without_gaps[i] = opk::contiguous(*from);
      from = &without_gaps[i];
    }
    parts[i] = {static_cast<const char*>(from->data()), to, from->numel() * size};
    to += parts[i].bytes;
  }
  copy(parts);
  return flat;
}

// Copies a flat tensor into the list.
void unflatten_list_(TensorList& tensors, const Tensor& flat) {
  const int64_t count = check_and_count(tensors);
  check_alike(flat, tensors[0], tensors[0].device(), tensors[0].dtype());
  OPK_CHECK(flat.numel() == count, "flat has ", flat.numel(), " elements, tensors have ", count);
  for (const Tensor& tensor : tensors) {
    opk::check_contiguous(tensor);
  }
  const Tensor source = opk::contiguous(flat);
  const int64_t size = source.element_size();
  Parts parts(tensors.size());
  const char* from = static_cast<const char*>(source.data());
  for (int64_t i = 0; i < tensors.size(); ++i) {
    parts[i] = {from, static_cast<char*>(tensors[i].data()), tensors[i].numel() * size};
    from += parts[i].bytes;
  }
  copy(parts);
}

OPK_PLAIN_END
#endif

}  // namespace
