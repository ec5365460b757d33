"""What the optimizers over whole lists of tensors share; no op of its own."""
