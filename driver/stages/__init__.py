"""The parts of a pipeline stage: threads, queues and fair shares."""
