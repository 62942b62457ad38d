"""Tools of the command line that need neither torch nor a GPU: new specs, listings, explanations, exports."""
