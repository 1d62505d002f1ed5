"""Where the tensors of a checkpoint come from: files, buckets, arrays in memory."""
