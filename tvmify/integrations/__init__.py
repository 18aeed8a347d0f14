"""Ways in that other packages offer: each file connects one of them to the dispatcher."""
