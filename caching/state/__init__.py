"""States of sequences that do not grow with their length, and the recurrences that update them."""
