"""The data as the model will see it, without the model: `packtrain inspect`, and the data section of reports.

`subject` opens what a config names; `token_scan` reads every token once, with `roles`, `vocabulary` and `near_duplicates`;
`statistics`, `mode_costs` and `audit` say what comes of it, `summary` puts it together, and `terminal` and `html` show it.
"""
