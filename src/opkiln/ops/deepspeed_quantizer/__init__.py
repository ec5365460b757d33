"""DeepSpeed's int8 and int4 quantizer: its layout, its levels and its scales."""
