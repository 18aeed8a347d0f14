"""Programs whose control flow depends on values: cut into regions, and Python between them."""
