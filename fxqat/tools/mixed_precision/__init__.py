"""Mixed precision: the loss and the cost of each bit width, and the best choice within a budget."""
