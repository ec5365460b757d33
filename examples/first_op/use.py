import torch
from first_op import scaled_add

x, y = torch.randn(1000, requires_grad=True), torch.randn(1000)
out = scaled_add(x, y, 0.5)
out.sum().backward()
assert torch.allclose(out, x + 0.5 * y)
assert torch.equal(x.grad, torch.ones(1000))
print("scaled_add is right, and so is its gradient")
