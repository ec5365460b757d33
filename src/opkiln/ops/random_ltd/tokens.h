// Shared by the CPU and CUDA versions of gathering and scattering tokens: argument checks,
// and the op's functions. A token is a row of bytes, for any dtype.
#pragma once

#include "indices.h"

namespace {

// Tokens in memory, by sequence and position.
struct Side {
  char* data;  // null: zeros
  int64_t batch, token;  // strides in bytes

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(OPKILN_EMULATED) || defined(__CUDACC_RTC__)
  __host__ __device__
#endif
  char* at(int64_t sequence, int64_t position) const {
    return data + sequence * batch + position * token;
  }
};

struct Tokens {
  Side all;   // [B, S]
  Side part;  // [B, K]
  Side out;   // [B, K] when gathering, [B, S] when merging
  Indices indices;  // [B, K]
  int64_t batch, kept, count;
  int64_t row;  // bytes per token
  bool batch_first;
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;

// Defined by each device's source. Called only if there is something to write.
void gather(const Tokens& tokens);   // out[b, k] = all[b, indices[b, k]]
void scatter(const Tokens& tokens);  // all[b, indices[b, k]] = part[b, k]
void merge(const Tokens& tokens);    // out[b, s] = part[b, k] where indices[b, k] = s, else all[b, s]

// The tensor itself if its channels are contiguous, or a contiguous copy.
Tensor make_readable(const Tensor& x) {
  return x.size(2) <= 1 || x.stride(2) == 1 ? x : opk::contiguous(x);
}

Side side_of(const Tensor& x, void* data, bool batch_first) {
  const int64_t size = x.element_size();
  return {static_cast<char*>(data), x.stride(batch_first ? 0 : 1) * size,
          x.stride(batch_first ? 1 : 0) * size};
}
Side read_side(const Tensor& x, bool batch_first) {
  return side_of(x, const_cast<void*>(x.data()), batch_first);
}

// Checks the tensors and returns the sizes. `picked` must outlive the result.
Tokens make_tokens(const Tensor& x, const Tensor& indices, const Tensor& picked, bool batch_first) {
  opk::device_of(x);
  opk::check_dim(x, 3);
  check_indices(indices);
  const int64_t batch = x.size(batch_first ? 0 : 1);
  OPK_CHECK(indices.dim() == 2 && indices.size(0) == batch, indices, " has shape ", indices.sizes(),
            ", expected [", batch, ", kept]");
  opk::check_same_device(x, indices);
  Tokens tokens{};
  tokens.indices = indices_of(picked);
  tokens.batch = batch;
  tokens.kept = indices.size(1);
  tokens.count = x.size(batch_first ? 1 : 0);
  tokens.row = x.size(2) * x.element_size();
  tokens.batch_first = batch_first;
  return tokens;
}

void check_part(const Tensor& x, const Tensor& part, const Tokens& tokens) {
  if (tokens.batch_first) {
    opk::check_shape(part, {tokens.batch, tokens.kept, x.size(2)});
  } else {
    opk::check_shape(part, {tokens.kept, tokens.batch, x.size(2)});
  }
  opk::check_same_dtype(x, part);
  opk::check_same_device(x, part);
}

Tensor empty_tokens(const Tensor& like, int64_t batch, int64_t count, bool batch_first) {
  return batch_first ? opk::empty({batch, count, like.size(2)}, like)
                     : opk::empty({count, batch, like.size(2)}, like);
}

Tensor token_gather(const Tensor& x, const Tensor& indices, bool batch_first) {
  const Tensor picked = opk::contiguous(indices);
  Tokens tokens = make_tokens(x, indices, picked, batch_first);
  const Tensor all = make_readable(x);
  Tensor out = empty_tokens(x, tokens.batch, tokens.kept, batch_first);
  tokens.all = read_side(all, batch_first);
  tokens.out = side_of(out, out.data(), batch_first);
  if (out.numel() > 0) gather(tokens);
  return out;
}

Tensor token_scatter(const Tensor& x, const Tensor& part, const Tensor& indices, bool batch_first) {
  const Tensor picked = opk::contiguous(indices);
  Tokens tokens = make_tokens(x, indices, picked, batch_first);
  const Tensor all = make_readable(x);
  check_part(x, part, tokens);
  const Tensor given = make_readable(part);
  Tensor out = empty_tokens(x, tokens.batch, tokens.count, batch_first);
  tokens.all = read_side(all, batch_first);
  tokens.part = read_side(given, batch_first);
  tokens.out = side_of(out, out.data(), batch_first);
  if (out.numel() > 0) merge(tokens);
  return out;
}

void token_scatter_(Tensor& x, const Tensor& part, const Tensor& indices, bool batch_first) {
  const Tensor picked = opk::contiguous(indices);
  Tokens tokens = make_tokens(x, indices, picked, batch_first);
  check_part(x, part, tokens);
  if (part.numel() == 0) return;
  const Tensor given = make_readable(part);
  Tensor all = make_readable(x);
  const bool copied = all.get() != x.get() && all.data() != static_cast<const Tensor&>(x).data();
  tokens.all = side_of(all, all.data(), batch_first);
  tokens.part = read_side(given, batch_first);
  scatter(tokens);
  if (copied) opk::call("aten::copy_", "", x, all, false);
}

Tensor token_spread(const Tensor& part, const Tensor& indices, int64_t count, bool batch_first) {
  const Tensor picked = opk::contiguous(indices);
  Tokens tokens = make_tokens(part, indices, picked, batch_first);
  const Tensor given = make_readable(part);
  OPK_CHECK(count >= 0, "tokens is ", count, ", expected at least 0");
  check_part(part, part, tokens);
  Tensor out = empty_tokens(part, tokens.batch, count, batch_first);
  tokens.count = count;
  tokens.part = read_side(given, batch_first);
  tokens.out = side_of(out, out.data(), batch_first);
  if (out.numel() > 0) merge(tokens);
  return out;
}

Tensor token_clear(const Tensor& x, const Tensor& indices, bool batch_first) {
  const Tensor picked = opk::contiguous(indices);
  Tokens tokens = make_tokens(x, indices, picked, batch_first);
  const Tensor all = make_readable(x);
  Tensor out = empty_tokens(x, tokens.batch, tokens.count, batch_first);
  tokens.all = read_side(all, batch_first);
  tokens.out = side_of(out, out.data(), batch_first);
  if (out.numel() > 0) merge(tokens);
  return out;
}

OPK_PLAIN_END
#endif

}  // namespace
