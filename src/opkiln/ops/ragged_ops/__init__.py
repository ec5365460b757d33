"""Host-side descriptors of ragged batches."""
