"""Seeing what attention does: the weights of a model while it runs, and one attention stage by stage."""

from .capture import capture
from .records import Captured, Record
from .trace import Trace, trace, trace_module

__all__ = ["Captured", "Record", "Trace", "capture", "trace", "trace_module"]
