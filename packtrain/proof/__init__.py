"""Which attention backend is exact on the loaded model: measured, not looked up."""
