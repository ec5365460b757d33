"""Group-wise quantization to narrow floating-point numbers: fp8, fp6, fp12, fp4."""
