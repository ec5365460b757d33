// The order of quantized groups in memory, for collectives over nodes and devices: see
// ops/quantizer/reference.py. For host and device code.
#pragma once

#include "op/types.h"

namespace opkiln {
namespace {  // libraries for several instruction sets in one process must not share a copy

struct GroupOrder {
  uint32_t nodes, devices, pipeline;
  uint32_t piece;  // groups per piece, of nodes * devices * pipeline pieces; 0: no reordering
};

// The position of a group in memory.
OPK_HOST_DEVICE inline int64_t place_of(int64_t group, const GroupOrder& order) {
  if (order.piece == 0) {
    return group;
  }
  const uint32_t at = static_cast<uint32_t>(group);
  const uint32_t cut = at / order.piece, part = cut / order.pipeline;
  const uint32_t node = part / order.devices;
  const uint32_t device = part - node * order.devices;
  const uint32_t turn = cut - part * order.pipeline;
  const uint32_t first = ((turn * order.devices + device) * order.nodes + node) * order.piece;
  return static_cast<int64_t>(first) + (at - cut * order.piece);
}

}  // namespace
}  // namespace opkiln
