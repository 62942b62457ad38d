"""The tools of the command that need neither torch nor a GPU: new specs, listings, explanations, exports."""
