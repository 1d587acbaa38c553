"""Recording: from a call of a PyTorch operator on lazy tensors to a node on the tape."""
