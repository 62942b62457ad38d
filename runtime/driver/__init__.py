"""Launches: parameter blocks, tensor maps and device workspaces."""
