"""The contracts of the executor's side: executors, guards, memory, and the serving half of transports, a module each.

Each kind's laws are in ``specs/kinds``; this command checks them: ``pytest --pyargs djinn_conformance
--djinn-plugin=NAME``.
"""
