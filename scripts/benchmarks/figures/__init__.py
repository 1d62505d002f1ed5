"""What was measured, on which machine, as a table and as a picture."""
