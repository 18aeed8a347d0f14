"""Calls back into PyTorch from a compiled program."""
