"""Checks that all processes of a run agree, before and while they train."""
