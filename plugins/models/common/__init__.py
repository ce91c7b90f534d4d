"""Layers shared by architectures."""
