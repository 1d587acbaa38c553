"""Bytes of tensors: their digests, copies that are kept or shared, and who uses how much."""
