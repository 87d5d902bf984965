"""Data: where examples come from, how clients share them, how a batch is made of them."""
