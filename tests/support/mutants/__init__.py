"""Faults planted in the product, each of which a law of the conformance kit must notice.

``python -m support.mutants [NAME ...]``, with the folder ``tests`` on the path, tries them and writes a line of JSON
for each.
"""
