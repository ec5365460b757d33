"""The fused pieces of a decoder: norms, activations, residual adds."""
