"""The data as the model will see it, without the model: `packtrain inspect`, and the data section of reports.

`corpus` opens what a config names; `scan/` reads every token once;
`statistics`, `mode_costs` and `audit` say what comes of it, `summary` puts it together, and `terminal` and `html` show it.
"""
