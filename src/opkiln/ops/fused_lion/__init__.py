"""Lion over a whole list of tensors at once, on a GPU or the CPU."""
