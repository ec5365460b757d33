// What a library says of each op, to the loader.
#pragma once

#include "shim.h"

struct opkiln_op {
  uint32_t abi;  // of this struct and of the functions below
  int32_t dtype;  // torch's number of the one dtype that the library is compiled for; -1: it is for all
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
  const char* reference;  // "ns::name" of the op whose overload `unserved` takes other calls, or null
  const opkiln_op* other;  // the same op of a library for another dtype, or null
  // Named so that a library has these functions if it has an op.
  const opkiln_op* (*list)();
  void (*describe)(const opkiln_op*, const char*, const char*);
  const char* (*enter)(const opkiln_op*, const char*, const char*);
  void (*leave)(const opkiln_op*);
  void (*link)(const opkiln_op*, const opkiln_op*);
};
