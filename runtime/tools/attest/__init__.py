"""Attestations: what the generator is made of, what sources and cubins were made from, signed, and checked again."""
