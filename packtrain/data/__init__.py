"""Data: turn the sources of data.train into documents of token ids with a loss mask.

Start at `prepare`. sources/ reads chunks of raw rows. formats/ parses them (docs/architecture.md explains how to add a format). tokens/
tokenises them, makes loss masks and caches both on disk. `dataset` serves them to training by index, with a report.
"""
