"""The CPU: step programs, C kernels, and the torch ops that call these kernels from Inductor
programs."""
