"""What has to survive: kills, rubbish, random requests, and ten thousand of them on a small pool."""
