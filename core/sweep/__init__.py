"""Sweeps (-m): every cell checked before the first runs, each in a process of its own, every ending recorded."""
