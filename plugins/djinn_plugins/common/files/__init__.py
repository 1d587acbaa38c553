"""Files with weights, and files that only their owner reads."""
