"""What differs for NVIDIA GPUs.

Products, convolutions and attention are left to the libraries that PyTorch calls; everything else
is fused by TVM and scheduled by its rules for GPUs. The kernels of a program become one fatbin.
"""
