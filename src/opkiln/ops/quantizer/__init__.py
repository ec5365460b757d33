"""Group-wise int8 and int4 quantization, and the reduction of quantized parts."""
