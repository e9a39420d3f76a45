"""The CPU: C kernels, step programs that run them, and weights in tiles."""
