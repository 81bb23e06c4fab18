"""From document lengths to micro-batches: which documents share a row, a step and a device."""
