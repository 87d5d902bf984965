"""Privacy: secure sums, private training (DP-SGD), noise on logits, and attacks on privacy."""
