"""From what data.train names to documents of token ids with a loss mask; `prepare` is the way in.

sources/ reads chunks of raw rows, formats/ parses them (docs/architecture.md says what a new format takes), tokens/ tokenises them, makes
loss masks and caches both on disk, and `dataset` serves them to training by index, with a report.
"""
