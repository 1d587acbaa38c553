"""The conformance kit: every law of ``specs/kinds``, tested on any plugin.

A plugin's author runs::

    pytest --pyargs djinn_conformance --djinn-plugin=NAME

from any directory. ``NAME`` is a plugin's entry point, the name of an object that it registers, or ``kind:name``.
"""
