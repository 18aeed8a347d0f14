"""Measured choice between kernels."""
