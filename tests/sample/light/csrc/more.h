#pragma once
#include <opkiln/op.h>

namespace texts {
opk::String twice(const opk::Tensor&, const opk::String& text);
}
void stream(const opk::Tensor&);
