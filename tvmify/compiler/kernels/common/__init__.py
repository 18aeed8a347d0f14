"""Code that the rules of all families share."""
