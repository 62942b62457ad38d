"""Signed attestations of the generator, its sources and cubins, and their verification."""
