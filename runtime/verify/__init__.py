"""The case table, the oracles and the run that fills in a receipt's verification."""
