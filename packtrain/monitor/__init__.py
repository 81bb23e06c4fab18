"""What every rank says of itself while it works, and who keeps the others waiting."""
