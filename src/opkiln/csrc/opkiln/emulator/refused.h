// CUDA functions that the emulator does not support. A file that uses
// one does not compile, and the compiler's message says why.
#pragma once

#define OPKILN_REFUSED(name, what)                                                              \
  template <class R = void, class... A>                                                         \
  __attribute__((error("the emulator does not run " what))) R name(A&&...)

OPKILN_REFUSED(tex1D, "textures");
OPKILN_REFUSED(tex2D, "textures");
OPKILN_REFUSED(tex3D, "textures");
OPKILN_REFUSED(tex1Dfetch, "textures");
OPKILN_REFUSED(surf2Dread, "surfaces");
OPKILN_REFUSED(surf2Dwrite, "surfaces");
OPKILN_REFUSED(__pipeline_memcpy_async, "asynchronous copies");
OPKILN_REFUSED(__pipeline_commit, "asynchronous copies");
OPKILN_REFUSED(__pipeline_wait_prior, "asynchronous copies");
OPKILN_REFUSED(__cluster_barrier_arrive, "thread block clusters");
OPKILN_REFUSED(__cluster_barrier_wait, "thread block clusters");
OPKILN_REFUSED(__cvta_generic_to_shared, "addresses for inline PTX");
#undef OPKILN_REFUSED
