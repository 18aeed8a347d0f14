"""What one program leaves open: sizes of tensors, and numbers. Begin with `generalizing`.

declared             which sizes the user declared to vary, and within which limits
symbols, hints       which sizes become symbols, and what kernels are tuned for
sizes, numbers       the two kinds of programs that serve many signatures
sizes_and_numbers    both at once
generalizing         tries these kinds in order
"""
