// Tensors. A `const Tensor&` is only read; a `Tensor&` may be written.
#pragma once

#include "error.h"

OPK_PLAIN_BEGIN
OPK_NAMESPACE_BEGIN

template <class T>
inline constexpr bool is_const = false;
template <class T>
inline constexpr bool is_const<const T> = true;

// A reference to a torch tensor. A copy refers to the same memory.
//
// Many functions here are marked noinline: a call costs a nanosecond, but code that is inlined everywhere is
// optimized everywhere, which is most of an op's compile time.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle owned, Origin origin = {}) : handle_(owned), origin_(origin) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()), origin_(other.origin_) {}
  Tensor(const Tensor& other) : origin_(other.origin_) {
    if (other.handle_) OPK_TORCH(aoti_torch_new_tensor_handle, other.handle_, &handle_);
  }
  Tensor& operator=(Tensor other) noexcept {
    const AtenTensorHandle mine = handle_;
    handle_ = other.handle_;
    other.handle_ = mine;
    origin_ = other.origin_;
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  [[gnu::noinline]] bool defined() const {
    bool out = false;
    if (handle_) OPK_TORCH(aoti_torch_is_defined, handle_, &out);
    return out;
  }
  int64_t dim() const { return get<int64_t>(aoti_torch_get_dim); }
  int64_t numel() const { return get<int64_t>(aoti_torch_get_numel); }
  int64_t storage_offset() const { return get<int64_t>(aoti_torch_get_storage_offset); }
  bool is_contiguous() const { return get<bool>(aoti_torch_is_contiguous); }
  [[gnu::noinline]] Ints sizes() const { return {get<int64_t*>(aoti_torch_get_sizes), dim()}; }
  [[gnu::noinline]] Ints strides() const { return {get<int64_t*>(aoti_torch_get_strides), dim()}; }
  int64_t size(int64_t d) const { return at(sizes(), d); }  // size(-1): the last dimension's
  int64_t stride(int64_t d) const { return at(strides(), d); }
  DType dtype() const { return static_cast<DType>(get<int32_t>(aoti_torch_get_dtype)); }
  int64_t element_size() const {
    return static_cast<int64_t>(aoti_torch_dtype_element_size(get<int32_t>(aoti_torch_get_dtype)));
  }
  [[gnu::noinline]] Device device() const {
    return {static_cast<DeviceType>(get<int32_t>(aoti_torch_get_device_type)),
            get<int32_t>(aoti_torch_get_device_index)};
  }
  bool is_cpu() const { return device().type == DeviceType::cpu; }
  bool is_cuda() const { return device().type == DeviceType::cuda; }

  // The elements. Raises if the tensor has another dtype: x.data<const float>(), out.data<float>(). A const
  // Tensor gives only const elements. Only the non-const form makes a private copy of copy-on-write memory.
  template <class T>
  T* data() const {
    static_assert(is_const<T>, "this tensor is only read: take data<const T>(), or a Tensor& argument "
                               "for a tensor that the op writes");
    return elements<T>();
  }
  template <class T>
  T* data() {
    return elements<T>();
  }
  const void* data() const { return check_memory(get<const void*>(torch_get_const_data_ptr), 1); }
  void* data() { return check_memory(get<void*>(torch_get_mutable_data_ptr), 1); }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() {
    const AtenTensorHandle mine = handle_;
    handle_ = nullptr;
    return mine;
  }
  Origin origin() const { return origin_; }

 private:
  template <class T>
  T get(AOTITorchError (*getter)(AtenTensorHandle, T*)) const {
    T out;
    if (__builtin_expect(!handle_ || getter(handle_, &out) != 0, 0)) {
      raise_torch_error(handle_ ? "reading a tensor's properties" : nullptr);
    }
    return out;
  }
  template <class T>
  T* elements() const {
    if constexpr (is_const<T>) {
      return static_cast<T*>(check_memory(get_const(dtype_of<T>), sizeof(T)));
    } else {
      return static_cast<T*>(check_memory(get_mutable(dtype_of<T>), sizeof(T)));
    }
  }
  // Checks that there is memory: a tensor whose storage was freed has elements but no memory. Also tells the
  // emulator which memory the kernels may touch.
  template <class P>
  P* check_memory(P* pointer, [[maybe_unused]] size_t element) const {
    if (__builtin_expect(!pointer && numel() > 0, 0)) {
      raise_form("%s has shape %s and no memory: its storage was freed", NameOf(*this).text,
                 ListOf(sizes()).text);
    }
#if defined(OPKILN_EMULATED)
    if (numel() > 0) {
      const Ints shape = sizes(), steps = strides();
      int64_t last = 0;
      for (int64_t i = 0; i < shape.size(); ++i) last += (shape[i] - 1) * steps[i];
      emulator::add_tensor(pointer, static_cast<size_t>((last + 1) * element_size()), element);
    }
#endif
    return pointer;
  }
  [[gnu::noinline]] const void* get_const(DType expected) const {
    check(expected);
    return get<const void*>(torch_get_const_data_ptr);
  }
  [[gnu::noinline]] void* get_mutable(DType expected) const {
    check(expected);
    return get<void*>(torch_get_mutable_data_ptr);
  }
  void check(DType expected) const {
    if (__builtin_expect(dtype() != expected, 0)) {
      raise_form("%s has dtype %s, expected %s", NameOf(*this).text, name_of(dtype()), name_of(expected));
    }
  }
  [[gnu::noinline]] int64_t at(Ints values, int64_t d) const {
    const int64_t i = d < 0 ? d + values.size() : d;
    if (__builtin_expect(i < 0 || i >= values.size(), 0)) {
      raise_form("%s has shape %s, so it has no dimension %lld", NameOf(*this).text, ListOf(sizes()).text,
                 static_cast<long long>(d));
    }
    return values[i];
  }

  AtenTensorHandle handle_ = nullptr;  // torch's handle; it holds one reference
  Origin origin_;
};

inline Part::Part(const Tensor& value) : kind(kOrigin), origin(value.origin()) {}

// Returns uninitialized memory.
[[gnu::noinline]] inline Tensor empty_strided(Ints sizes, Ints strides, DType dtype, Device device) {
  if (__builtin_expect(sizes.size() != strides.size(), 0)) {
    raise_form("empty_strided: the sizes %s and the strides %s differ in length", ListOf(sizes).text,
               ListOf(strides).text);
  }
  AtenTensorHandle out = nullptr;
  OPK_TORCH(aoti_torch_empty_strided, sizes.size(), sizes.data(), strides.data(),
            static_cast<int32_t>(dtype), static_cast<int32_t>(device.type), device.index, &out);
  return Tensor(out);
}

[[gnu::noinline]] inline Tensor empty(Ints sizes, DType dtype, Device device) {
  constexpr int64_t kMost = 64;  // torch's own limit
  int64_t strides[kMost], step = 1;
  if (__builtin_expect(sizes.size() > kMost, 0)) {
    raise_form("empty: the shape %s has too many dimensions", ListOf(sizes).text);
  }
  for (int64_t i = sizes.size(); i-- > 0;) {
    if (__builtin_expect(sizes[i] < 0, 0)) {
      raise_form("empty: the shape %s has a negative size", ListOf(sizes).text);
    }
    strides[i] = step;
    step *= sizes[i] > 0 ? sizes[i] : 1;
  }
  return empty_strided(sizes, {strides, sizes.size()}, dtype, device);
}

// Takes dtype and device from another tensor.
inline Tensor empty(Ints sizes, const Tensor& like) { return empty(sizes, like.dtype(), like.device()); }

// Takes shape, strides, dtype and device from another tensor. If that tensor has gaps or overlaps, torch
// chooses the strides, as in torch.empty_like.
[[gnu::noinline]] inline Tensor empty_like(const Tensor& like) {
  if (like.is_contiguous()) {
    return empty_strided(like.sizes(), like.strides(), like.dtype(), like.device());
  }
  // The other arguments (dtype, layout, device, pin_memory and memory_format) are None.
  StableIValue stack[6] = {reinterpret_cast<StableIValue>(Tensor(like).release())};
  OPK_TORCH(torch_call_dispatcher, "aten::empty_like", "", stack, kTorch);
  return Tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
}

[[gnu::noinline]] inline Tensor zeros(Ints sizes, DType dtype, Device device) {
  Tensor out = empty(sizes, dtype, device);
  OPK_TORCH(aoti_torch_zero_, out.get());
  return out;
}
inline Tensor zeros(Ints sizes, const Tensor& like) { return zeros(sizes, like.dtype(), like.device()); }

// The tensor itself, or a contiguous copy of it.
[[gnu::noinline]] inline Tensor contiguous(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  StableIValue stack[2] = {reinterpret_cast<StableIValue>(Tensor(tensor).release()), 0};
  OPK_TORCH(torch_call_dispatcher, "aten::contiguous", "", stack, kTorch);
  return Tensor(reinterpret_cast<AtenTensorHandle>(stack[0]), tensor.origin());
}

OPK_NAMESPACE_END
OPK_PLAIN_END
