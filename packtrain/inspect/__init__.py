"""The data as the model will see it, without the model: `packtrain inspect` and reports.

`corpus` opens the data of a config and plans its steps. `audit` reads every token once and judges. `summary` is the verb: it collects the
figures, with the costs of each mode, and shows documents. `picture_facts` has the faults and thumbnails of pictures. `rendering` writes summary and examples to a terminal or a page."""
