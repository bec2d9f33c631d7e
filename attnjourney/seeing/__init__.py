"""Seeing what attention does: `recording` takes weights and stages from a run, `drawing` makes pictures of them."""
