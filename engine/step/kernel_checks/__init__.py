"""Whether this machine's kernels compute what they should, before they serve."""
