"""Library: graphs of recorded operations, their annotation, and the contracts of plugins that annotate.

It builds graphs from tapes, annotates them with the help of pattern and analyzer plugins, and writes them to documents.
No operation passes through it.
"""
