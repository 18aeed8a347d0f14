"""Kernels without sums: arithmetic, permutations, gathers."""
