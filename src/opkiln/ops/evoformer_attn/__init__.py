"""``evoformer_attn``: attention over alignments and pairs, with two additive biases."""
