"""Run mode `cuda`."""
