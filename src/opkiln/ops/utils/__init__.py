"""Lists of tensors as one flat tensor and back. The name is the one that DeepSpeed's users know."""
