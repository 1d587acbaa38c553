"""Sessions: settings, connections, and the backend that takes recorded operations to executors."""
