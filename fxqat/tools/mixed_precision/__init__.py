"""Which tensors need more bits, what more bits cost, and the best choice within a budget."""
