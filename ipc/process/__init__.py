"""A process of ours on its machine: its log, its open files, its service manager."""
