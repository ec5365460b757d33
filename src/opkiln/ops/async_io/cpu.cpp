// The op's functions.

#include "numbered.h"

using aio::Ints;
using opk::Tensor;

namespace {

int host_only(const Tensor& memory, aio::Queue&) {
  OPK_CHECK(memory.is_cpu(), memory, " is not on the CPU");
  return -1;
}

}  // namespace

Tensor aio_probe(const Tensor&, const opk::String& engine) {
  const aio::BlockSignals blocked;
  const aio::Event event;
  int error = 0;
  delete aio::open_engine(engine.c_str(), 4, 1, event.descriptor, error);
  return aio::numbers({error});
}

Tensor aio_open(const Tensor&, const opk::String& engine, int64_t depth, int64_t block_size,
                int64_t threads) {
  aio::check_sizes(depth, block_size, threads);
  const aio::BlockSignals blocked;
  aio::Event event;
  int error = 0;
  std::unique_ptr<aio::Engine> opened(aio::open_engine(engine.c_str(), static_cast<unsigned>(depth),
                                                       static_cast<unsigned>(threads), event.descriptor, error));
  if (!opened) {
    opk::raise(engine.c_str(), " cannot be used: ",
               error == aio::kNotCompiled ? "its header was not there when this op was compiled" : strerror(error));
  }
  return aio::enter(std::move(opened), event, depth, block_size);
}

Tensor aio_read_(Tensor& queue, opk::TensorList& memory, const Ints& offsets, const Ints& files,
                 const Ints& descriptors) {
  return aio::add(queue, memory, 0, offsets, files, descriptors, false, host_only);
}

Tensor aio_write(Tensor& queue, const opk::TensorList& memory, const Ints& offsets, const Ints& files,
                 const Ints& descriptors) {
  return aio::add(queue, memory, true, offsets, files, descriptors, true, host_only);
}

Tensor aio_wait(Tensor& queue, int64_t request, int64_t milliseconds) {
  return aio::wait(queue, request, milliseconds);
}

// Separate from aio_wait, so that a caller who is interrupted between the two can wait again.
void aio_forget(Tensor& queue, int64_t request) { aio::queue_of(queue)->forget(request); }

void aio_cancel(Tensor& queue, int64_t request) { aio::queue_of(queue)->cancel(request); }

void aio_close(Tensor& queue) { aio::leave(queue); }

OPKILN_OP(aio_probe, cpu);
OPKILN_OP(aio_open, cpu);
OPKILN_OP(aio_read_, cpu);
OPKILN_OP(aio_write, cpu);
OPKILN_OP(aio_wait, cpu);
OPKILN_OP(aio_forget, cpu);
OPKILN_OP(aio_cancel, cpu);
OPKILN_OP(aio_close, cpu);
