"""What the rules of all families share."""
