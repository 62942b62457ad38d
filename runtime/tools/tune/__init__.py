"""Times candidates for problems and keeps what was found: the command ``codegen tune``."""
