"""Settings that several plugins read."""
