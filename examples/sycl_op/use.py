import torch
from sycl_op import silu_mul

x, y = torch.randn(1000), torch.randn(1000)
out = silu_mul(x, y)
torch.testing.assert_close(out, torch.nn.functional.silu(x) * y)
print("silu_mul is right")
