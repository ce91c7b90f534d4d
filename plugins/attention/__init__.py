"""Attention backends. Each owns the layout of its KV cache."""
