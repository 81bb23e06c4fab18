"""Starting the processes of a plan and bringing them to one exit code; execute.py carries a plan out."""
