"""Launch of a plan: its processes and their one exit code. Begin with execute.py, which carries a plan out."""
