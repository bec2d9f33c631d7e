"""Attention on record: the weights of a model while it runs (capture), one attention stage by stage (trace)."""

from .capture import capture as capture
from .records import Captured as Captured
from .records import Record as Record
from .trace import Trace as Trace
from .trace import trace as trace
from .trace import trace_module as trace_module
