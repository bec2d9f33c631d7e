"""attention and its relatives: values, gradients, options, masks, packed sequences, derivatives, torch's tests."""
