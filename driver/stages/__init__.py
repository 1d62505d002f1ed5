"""What the stages of the pipeline are made of: threads, queues and whose turn it is."""
