// op.h for device code that NVRTC compiles. Host functions are cut out of the source before
// (opkiln/machine/nvrtc/cut.py), so the host's types need only be declared.
#pragma once

#define OPKILN_OP(function, device) static_assert(true, "the host's")

OPK_NAMESPACE_BEGIN

class Tensor;
struct Device;
struct Ints;
struct Extent;
struct Launch;
class String;
template <class T>
class optional;
template <class T>
class List;
using TensorList = List<Tensor>;

OPK_NAMESPACE_END
