// packed_gemm: argument checks for the product in opkiln/few_rows.h. The variant defines CODES and T.
#include <opkiln/op.h>

#include <opkiln/few_rows.h>

using namespace opkiln::few_rows;
using opk::Tensor;

using Element = opk::T;
using Codes = opkiln::formats::CODES<Element>;

Tensor packed_gemm(const Tensor& x, const Tensor& codes, const opk::optional<Tensor>& scales,
                   const opk::optional<Tensor>& offsets, const opk::optional<Tensor>& bias, int64_t outputs,
                   int64_t group_size, int64_t, int64_t activation) {
  opk::check_dim(x, 2);
  OPK_CHECK(activation >= 0 && activation <= static_cast<int>(Activation::kSilu), "activation is ", activation,
            ", expected 0 to ", static_cast<int>(Activation::kSilu));
  opk::check_contiguous(x, codes);
  opk::check_same_device(x, codes);
  const Tensor* const read[] = {&x, &codes};
  for (const Tensor* each : read) {
    OPK_SERVED(reinterpret_cast<uintptr_t>(each->data()) % 16 == 0, *each, " does not begin at a multiple of 16 bytes");
  }
  const int64_t columns = x.size(1), experts = offsets.has_value() ? offsets->numel() : 1;
  constexpr int kCount = Codes::kCount;
  const int64_t row_bytes = columns / kCount * Codes::kWords * 4;
  OPK_CHECK(columns > 0 && columns % kCount == 0, x, " has ", columns, " columns, expected a multiple of ", kCount);
  const bool bytes = codes.dtype() == opk::DType::uint8 || codes.dtype() == opk::DType::int8;
  OPK_CHECK(bytes || (kCount == 8 && codes.dtype() == x.dtype()), codes, " has dtype ", codes.dtype(),
            ", expected the dtype of these weights");
  const int64_t found = codes.numel() * (bytes ? 1 : 2);
  OPK_CHECK(found == experts * outputs * row_bytes, codes, " has ", found, " bytes, expected ",
            experts * outputs * row_bytes);
  constexpr int64_t kMost = int64_t{1} << 31;
  OPK_CHECK(x.size(0) < kMost - 16 && experts * outputs < kMost - 32 && columns * 16 < kMost, x, " has shape ",
            x.sizes(), ", and there are ", experts * outputs, " outputs, which is too large");
  Work<Element> work = {};
  work.x = x.data<const Element>();
  work.codes = static_cast<const uint32_t*>(codes.data());
  work.rows = static_cast<int32_t>(x.size(0));
  work.outputs = static_cast<int32_t>(outputs);
  work.columns = static_cast<int32_t>(columns);
  work.experts = static_cast<int32_t>(experts);
  work.activation = static_cast<Activation>(activation);
  if (scales.has_value()) {
    opk::check_dtype(*scales, opk::DType::float32);
    opk::check_same_device(x, *scales);
    opk::check_contiguous(*scales);
    OPK_CHECK(group_size > 0, "group_size is ", group_size, ", expected at least 1");
    const int64_t groups = (experts * outputs * columns + group_size - 1) / group_size;
    opk::check_shape(*scales, {groups});
    OPK_CHECK(set_scales<Codes>(work, scales->data<const float>(), group_size), "group_size is ", group_size,
              ", expected whole rows, or a part of ", columns, " columns that is a multiple of ", kChunk<Codes>);
  } else {
    set_scales<Codes>(work, nullptr, columns);
  }
  if (offsets.has_value()) {
    opk::check_dtype(*offsets, opk::DType::int32);
    opk::check_same_device(x, *offsets);
    opk::check_contiguous(*offsets);
    work.offsets = offsets->data<const int32_t>();
  }
  if (bias.has_value()) {
    opk::check_same_dtype(x, *bias);
    opk::check_same_device(x, *bias);
    opk::check_contiguous(*bias);
    OPK_CHECK(bias->numel() == experts * outputs, *bias, " has ", bias->numel(), " elements, expected ",
              experts * outputs);
    work.bias = bias->data<const Element>();
  }
  Tensor out = opk::empty({x.size(0), outputs}, x);
  work.out = out.data<Element>();
  multiply<Codes>(work);
  return out;
}

OPKILN_OP(packed_gemm, cuda);
