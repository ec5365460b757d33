// The op's functions.

#include "../async_io/numbered.h"
#include "engine.h"

using aio::Ints;
using opk::String;
using opk::Tensor;

namespace {

String text(const std::string& words) { return String(words.data(), words.size()); }

const gds::Driver& driver() {
  std::string why;
  const gds::Driver* const found = gds::Driver::open(why);
  OPK_CHECK(found != nullptr, why.c_str());
  return *found;
}

const gds::CuFile& cufile(const String& libraries) {
  std::string why;
  const gds::CuFile* const found = gds::CuFile::open(libraries.c_str(), why);
  OPK_CHECK(found != nullptr, "cuFile cannot be used: ", why.c_str());
  return *found;
}

// Makes the context of the memory's device current in this thread, which may never have used CUDA.
bool make_current(const Tensor& memory, std::string& why) {
  return !memory.is_cuda() || driver().enter(memory.device().index, why);
}

gds::DeviceEngine& engine_of(aio::Queue& queue) { return static_cast<gds::DeviceEngine&>(queue.engine()); }

int device_of(const Tensor& memory, aio::Queue& queue) { return engine_of(queue).device_of(memory); }

}  // namespace

// Reports what the driver and cuFile support. 0: GPUDirect Storage works; 1: cuFile copies through the host;
// 2: there is no cuFile, or it was not to be used; 3: there is no driver.
opk::tuple<int64_t, String> gds_probe(const Tensor&, bool use_cufile, const String& libraries) {
  const aio::BlockSignals blocked;  // cuFile starts threads
  std::string why;
  if (gds::Driver::open(why) == nullptr) return {3, text(why)};
  if (!use_cufile) return {2, text(why)};
  const gds::CuFile* const found = gds::CuFile::open(libraries.c_str(), why);
  if (found == nullptr) return {2, text(why)};
  return {found->direct ? 0 : 1, text(found->about)};
}

Tensor gds_open(const Tensor&, bool use_cufile, const String& libraries, int64_t depth, int64_t block_size,
                int64_t threads, bool host_too) {
  aio::check_sizes(depth, block_size, threads);
  const aio::BlockSignals blocked;
  const gds::CuFile* const file = use_cufile ? &cufile(libraries) : nullptr;
  aio::Event event;
  auto engine = std::make_unique<gds::DeviceEngine>(event.descriptor, driver(), file, host_too);
  const int error = engine->open(static_cast<size_t>(threads));
  OPK_CHECK(error == 0, "no thread can be started: ", strerror(error));
  return aio::enter(std::move(engine), event, depth, block_size);
}

Tensor gds_read_(Tensor& queue, opk::TensorList& memory, const Ints& offsets, const Ints& files,
                 const Ints& descriptors) {
  return aio::add(queue, memory, 0, offsets, files, descriptors, false, device_of);
}

Tensor gds_write(Tensor& queue, const opk::TensorList& memory, const Ints& offsets, const Ints& files,
                 const Ints& descriptors) {
  return aio::add(queue, memory, true, offsets, files, descriptors, true, device_of);
}

Tensor gds_wait(Tensor& queue, int64_t request, int64_t milliseconds) {
  return aio::wait(queue, request, milliseconds);
}

void gds_forget(Tensor& queue, int64_t request) { aio::queue_of(queue)->forget(request); }

void gds_cancel(Tensor& queue, int64_t request) { aio::queue_of(queue)->cancel(request); }

void gds_close(Tensor& queue) { aio::leave(queue); }

// Bytes moved by cuFile, bytes moved by the host, why cuFile refused a request, why a copy failed.
opk::tuple<int64_t, int64_t, String, String> gds_ways(Tensor& queue) {
  const gds::Ways ways = engine_of(*aio::queue_of(queue)).ways();
  return {ways.by_cufile, ways.by_host, text(ways.refused), text(ways.failed)};
}

String gds_register(const Tensor& memory, const String& libraries) {
  const aio::BlockSignals blocked;
  std::string why;
  if (!make_current(memory, why)) return text(why);
  return text(gds::register_memory(driver(), cufile(libraries), memory.data(),
                                   static_cast<size_t>(memory.numel() * memory.element_size())));
}

String gds_unregister(const Tensor& memory, const String& libraries) {
  std::string why;
  if (!make_current(memory, why)) return text(why);
  return text(gds::unregister_memory(driver(), cufile(libraries), memory.data()));
}

OPKILN_OP(gds_probe, cpu);
OPKILN_OP(gds_open, cpu);
OPKILN_OP(gds_read_, cpu);
OPKILN_OP(gds_write, cpu);
OPKILN_OP(gds_wait, cpu);
OPKILN_OP(gds_forget, cpu);
OPKILN_OP(gds_cancel, cpu);
OPKILN_OP(gds_close, cpu);
OPKILN_OP(gds_ways, cpu);
OPKILN_OP(gds_register, cpu);
OPKILN_OP(gds_unregister, cpu);
// These run on the host, on the device's memory.
OPKILN_OP(gds_read_, cuda);
OPKILN_OP(gds_write, cuda);
OPKILN_OP(gds_register, cuda);
OPKILN_OP(gds_unregister, cuda);
