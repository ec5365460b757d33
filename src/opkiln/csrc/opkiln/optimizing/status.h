// The status of a step over kept lists. Unless it is kMade, nothing was written. The numbers equal those of
// Status in opkiln/ops/optimizing/op_calls.py. Other problems are raised as errors.
#pragma once

#include <cstdint>

namespace opkiln {
namespace status {

constexpr int64_t kMade = 0;
constexpr int64_t kNotKept = 1;  // the op keeps no lists for this ticket
constexpr int64_t kLayout = 2;   // a tensor's layout differs from what the kept lists need

}  // namespace status
}  // namespace opkiln
