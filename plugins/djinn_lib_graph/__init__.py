"""Library: graphs of recorded operations, what they mean, and the contracts of plugins that find that out.

It builds graphs from tapes, annotates them with the help of pattern and analyzer plugins, and writes them to documents.
No operation passes through it.
"""
