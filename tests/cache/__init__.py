"""Caches, decoding over them, and the layers as they generate token by token."""
