"""Seeing what attention does: the weights of a model while it runs, and one attention stage by stage."""

from .capture import Captured, Record, capture

__all__ = ["Captured", "Record", "capture"]
