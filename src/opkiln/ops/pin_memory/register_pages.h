// What the binding asks of CUDA's runtime. Needs neither torch's headers nor CUDA's.
#pragma once

#include <cstddef>

namespace opkiln {

// Null, or the text of CUDA's error.
const char* register_pages(void* memory, std::size_t bytes);
const char* unregister_pages(void* memory);

}  // namespace opkiln
