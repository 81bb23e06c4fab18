"""Checks of the facts of a machine, with their fixes. Pure."""
