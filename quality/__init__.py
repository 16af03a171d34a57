"""Drift against a BF16 reference, step by step, and the reports it is written into."""
