"""What is done in another way for NVIDIA GPUs.

Products, convolutions and attention are left to the libraries that PyTorch calls, all else is fused
by TVM and scheduled by its rules for GPUs, and the kernels of a program become one cubin.
"""
