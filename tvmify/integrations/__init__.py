"""Other ways in than the decorator, on what the decorator stands on."""
