"""What of the CUDA library can be tested without a GPU: the build and its record, refusals, launches."""
