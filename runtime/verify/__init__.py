"""Case tables, oracles, and the runs that produce a receipt's verification."""
