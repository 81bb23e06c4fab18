"""Inspection of data without the model: `packtrain inspect`, and the data section of reports.

`corpus` opens the data of a config; `scan` reads every token once. `mode_costs` and `audit` judge the result, `summary` collects it.
`examples` shows documents, and `rendering` writes to a terminal or a page.
"""
