"""ATen programs: decomposed, checked, and translated to Relax."""
