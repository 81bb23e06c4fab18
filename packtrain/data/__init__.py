"""From what data.train names to documents of token ids with a loss mask; `prepare` is the way in.

sources/ gives chunks of raw rows, formats/ says what a row is (a new format is one function there), tokens/ makes ids and
masks of it and keeps them on disk, and `dataset` gives them to training by number, with the counts of `counts`.
"""
