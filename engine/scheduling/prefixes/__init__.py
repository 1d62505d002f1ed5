"""What is known already of the tokens of sequences: pages by key, and recurrent states."""
