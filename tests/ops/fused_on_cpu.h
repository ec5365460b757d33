// What the fused optimizers' kernels on the CPU share: plans in host memory, launches counted.
#pragma once

#include <opkiln/optimizing/plan.cu>
#include <vector>

using opkiln::multi_tensor::Item;
using opkiln::multi_tensor::Plan;

struct Items {
  const Item* items;
  const uint64_t* gradients;
  std::size_t count;
  float* const* steps;
  std::size_t step_count;
};

extern "C" std::size_t item_bytes() {
  return sizeof(Item);
}

// The number of launches that a step took after the plan was written, or -1. Every write of the plan
// must stay inside its memory: what is around it is looked at.
template <class Enqueue>
int run_items(const Items& given, const Enqueue& enqueue) {
  using namespace opkiln::multi_tensor;
  std::vector<Item> items(given.items, given.items + given.count);
  Sizes sizes{static_cast<uint32_t>(given.count), static_cast<uint32_t>(given.step_count), 0};
  bool plain = true;
  for (std::size_t i = 0; i < given.count; ++i) {
    items[i].first = sizes.chunks;
    sizes.chunks += static_cast<uint32_t>((items[i].numel + kChunk - 1) / kChunk);
    plain = plain && items[i].param_type == opkiln::ElementType::kFloat &&
        given.gradients[i] >> kTypeShift == 0;
  }
  constexpr uint64_t kUntouched = 0x5a5a5a5a5a5a5a5a;
  const std::size_t words = plan_words(sizes);
  std::vector<uint64_t> memory(words + 2, kUntouched);
  const Plan plan = plan_at(memory.data(), sizes, plain);
  if (write_items(plan, items.data(), given.steps, nullptr) != nullptr ||
      write_gradients(plan, given.gradients, nullptr) != nullptr) {
    return -1;
  }
  launches = 0;
  const char* const error = enqueue(plan);
  const bool inside = memory[words] == kUntouched && memory[words + 1] == kUntouched;
  return error == nullptr && inside ? launches : -1;
}
