"""Sign bits of tensors, eight to a byte."""
