// The result of a step over kept lists. Nothing is written unless it is kMade. The numbers are those of
// Status in opkiln/ops/optimizing/op_calls.py. Any other problem is raised as an error.
#pragma once

#include <cstdint>

namespace opkiln {
namespace status {

constexpr int64_t kMade = 0;
constexpr int64_t kNotKept = 1;  // the op keeps nothing for this call
constexpr int64_t kLayout = 2;   // a tensor is not laid out as the kept lists need it

}  // namespace status
}  // namespace opkiln
