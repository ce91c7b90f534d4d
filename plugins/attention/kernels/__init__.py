"""Triton kernels of paged attention. Keys and values of a layer are [blocks, K, P, D] views; only D must be contiguous."""
