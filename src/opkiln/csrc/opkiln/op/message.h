// Formats error messages.
#pragma once

#include <stdarg.h>

#include "record.h"
#include "tensor.h"

OPK_RARE_BEGIN
OPK_NAMESPACE_BEGIN

OPK_COLD inline void Error::add(const char* form, ...) {
  const size_t used = __builtin_strlen(text);
  va_list values;
  va_start(values, form);
  __builtin_vsnprintf(text + used, sizeof text - used, form, values);
  va_end(values);
}

OPK_COLD inline void raise_form(const char* form, ...) {
  Error error;
  va_list values;
  va_start(values, form);
  __builtin_vsnprintf(error.text, sizeof error.text, form, values);
  va_end(values);
  throw error;
}

OPK_COLD inline void Error::begin_with(const char* op) {
  if (begun) return;
  Error whole;
  whole.begun = true;
  whole.add("%s: %s", op, text);
  *this = whole;
}

OPK_COLD inline NameOf::NameOf(const Origin& origin) {
  const char* name = origin.op ? origin.op->argument_names : "a tensor";
  for (int32_t i = 0; i < origin.argument && name; ++i) {
    name = __builtin_strchr(name, ',');
    if (name) ++name;
  }
  const int length = name ? static_cast<int>(__builtin_strcspn(name, ",")) : 0;
  int size = name ? __builtin_snprintf(text, sizeof text, "%.*s", length, name)
                  // not registered yet
                  : __builtin_snprintf(text, sizeof text, "argument %d", origin.argument);
  if (size >= static_cast<int>(sizeof text)) size = sizeof text - 1;
  if (origin.item >= 0) __builtin_snprintf(text + size, sizeof text - size, "[%d]", origin.item);
}
inline NameOf::NameOf(const Tensor& tensor) : NameOf(tensor.origin()) {}

OPK_COLD inline ListOf::ListOf(Ints values) {
  char* to = text;
  *to++ = '[';
  for (int64_t i = 0; i < values.size(); ++i) {
    const bool room = to < text + sizeof text - 30;
    to += __builtin_sprintf(to, !room ? ", ..." : i ? ", %lld" : "%lld", static_cast<long long>(values[i]));
    if (!room) break;
  }
  *to++ = ']';
  *to = 0;
}

OPK_COLD inline DeviceOf::DeviceOf(Device device) {
  __builtin_snprintf(text, sizeof text, device.index < 0 ? "%s" : "%s:%d", name_of(device.type), device.index);
}

OPK_NAMESPACE_END
OPK_RARE_END
