"""Jobs of Slurm: scripts, submitting them, and starting packtrain on every machine of one."""
