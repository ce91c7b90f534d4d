"""Samplers: from logits to tokens."""
