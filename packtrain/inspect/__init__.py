"""The data as the model will see it, without the model: `packtrain inspect` and reports.

`corpus` opens the data of a config. `scan` reads every token once. `mode_costs` and `audit` judge the results, and `summary` collects
them. `examples` shows documents. `rendering` writes summary and examples to a terminal or a page."""
