// What a library tells the loader about each op.
#pragma once

#include "shim.h"

struct opkiln_op {
  uint32_t abi;  // version of this struct and of the functions below
  int32_t dtype;  // torch's number of the only dtype that the library serves; -1: all dtypes
  const char* name;
  const char* device;  // cpu, cuda, xpu
  const char* signature;  // in the words of torch schemas: (Tensor, Tensor(!), int) -> Tensor
  const opkiln_op* next;
  // The loader does not read the members below.
  void (*run)(StableIValue* stack, uint64_t arguments, uint64_t results);
  const char* key;  // torch's dispatch key of the device
  const char* file;
  uint32_t line;
  const char* argument_names;  // joined by commas, for messages; set by the loader
  TorchLibraryHandle library;  // set while the op is registered
  // "ns::name" of the op whose overload `unserved` takes calls that the kernel does not serve, or null
  const char* reference;
  const opkiln_op* other;  // the same op in a library for another dtype, or null
  // Members, so that every library with an op contains these functions.
  const opkiln_op* (*list)();
  void (*describe)(const opkiln_op*, const char*, const char*);
  const char* (*enter)(const opkiln_op*, const char*, const char*);
  void (*leave)(const opkiln_op*);
  void (*link)(const opkiln_op*, const opkiln_op*);
};
