import torch
from cuda_op import bias_gelu

device = "cuda" if torch.cuda.is_available() else "cpu"  # torch's word for ROCm's devices, too
served = f"native code for {device}" if bias_gelu.load(device) else "the reference"

x = torch.randn(64, 1000, device=device, requires_grad=True)
bias = torch.randn(1000, device=device, requires_grad=True)
out = bias_gelu(x, bias)
out.square().sum().backward()

expected = torch.nn.functional.gelu(x + bias)
grads = torch.autograd.grad(expected.square().sum(), (x, bias))
torch.testing.assert_close(out, expected)
torch.testing.assert_close((x.grad, bias.grad), grads)
print(f"bias_gelu is right, and so is its gradient: {served}")
