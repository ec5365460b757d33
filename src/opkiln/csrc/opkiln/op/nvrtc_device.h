// op.h for device code that NVRTC compiles. The host's functions are taken out of the source before
// (opkiln/machine/nvrtc/cut.py), so names of the host's types need only exist.
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
