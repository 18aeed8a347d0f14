"""Epilogues: the element-wise chain that a kernel applies as it stores its result."""
