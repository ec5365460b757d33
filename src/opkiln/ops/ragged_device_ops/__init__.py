"""Kernels for ragged batches: the tokens of all sequences one after the other, without padding."""
