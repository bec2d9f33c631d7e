"""Linear attention and Infini-attention."""
