"""What a model takes of each device, and how many pages are left."""
