"""The command ``codegen tune``: times candidates for problems, and stores the results."""
