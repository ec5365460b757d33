// What a library says of each op, to the loader.
#pragma once

#include "shim.h"

struct opkiln_op {
  uint32_t abi;  // of this struct and of the three functions below
  const char* name;
  const char* device;  // cpu, cuda, xpu
  const char* signature;  // in the words of schemas: (Tensor, Tensor(!), int) -> Tensor
  const opkiln_op* next;
  // The loader does not read what follows.
  void (*run)(StableIValue* stack, uint64_t arguments, uint64_t results);
  const char* key;  // torch's word for the device
  const char* file;
  uint32_t line;
  const char* argument_names;  // joined by commas, for messages; given by the loader
  TorchLibraryHandle library;  // while it is registered
};
