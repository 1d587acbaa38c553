"""The plugins of this project, by rooms; each room has a README."""
