"""Convolutions and pooling of images."""
