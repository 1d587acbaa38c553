"""The device in PyTorch."""
