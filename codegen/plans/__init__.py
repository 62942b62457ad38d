"""One module per kernel template: from a spec to its plan. ``codegen.operators`` names the module of each spec."""
