"""The CPU: step programs and C kernels, and what programs of torch's compiler call of them."""
