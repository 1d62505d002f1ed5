"""The devices of a process: how they are had, what they refuse, the threads that XLA has for them, and their mesh."""
