"""Attention under one dense mask: the plain reference, for tests and small rows."""
