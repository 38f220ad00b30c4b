"""The row table and the two doors between host and device. The only place (with loading and warm-up) that may
move data."""
