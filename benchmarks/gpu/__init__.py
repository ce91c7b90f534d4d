"""Measurements that need a GPU; each prints a short table last."""
