"""Progress reports of all ranks during a run, and the watchdog that finds which rank keeps the others waiting."""
