"""The faults that are planted in kernels: (what, file, old text, new text)."""
