"""The decorator: on classes, instances, methods and functions."""
