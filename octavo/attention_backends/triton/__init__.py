"""Paged attention in Triton kernels, for NVIDIA GPUs, and for any CPU through Triton's interpreter."""
