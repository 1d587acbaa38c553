"""The operators that are kept by hand, and what is known of PyTorch's."""
