"""`packtrain env` and `packtrain doctor`: facts about a machine or a run, checks, and reports."""
