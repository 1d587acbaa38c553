"""Faults planted in the product, each of which a law of the conformance kit must notice.

``python -m mutants [NAME ...]``, with this folder's parent on the path, tries them and writes a line of JSON for each.
"""
