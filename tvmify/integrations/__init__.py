"""Entry points other than the decorator, built on the same dispatcher."""
