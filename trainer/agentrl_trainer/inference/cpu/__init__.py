"""What the embedded sampler computes with on a CPU: kernels in C, and products."""
