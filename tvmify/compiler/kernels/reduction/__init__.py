"""Reductions along rows and columns: softmax, norms, means, running sums."""
