"""Attention on record: the weights of a model while it runs (capture), one attention stage by stage (trace), and what
layers keep in a state (capture, trace_state)."""

from .capture import capture as capture
from .records import Captured as Captured
from .records import Record as Record
from .records import StateRecord as StateRecord
from .trace import Trace as Trace
from .trace import trace as trace
from .trace import trace_module as trace_module
from .trace_state import trace_state as trace_state
