"""The data as the model will see it, without the model: `packtrain inspect`, and the data section of reports.

`corpus` opens what a config names; `scan` reads every token once; `mode_costs` and `audit` judge what it finds, `summary` puts
it together, `examples` shows documents, and `rendering` writes both to a terminal or a page.
"""
