"""Seeing what attention does: heat maps of any length, what each head does in numbers.

attention_maps, head_summary, weights_summary need torch alone; heatmap and summary_figure draw with
matplotlib, tables are printed with rich (`pip install 'attnjourney[viz]'` brings both).
"""

from .figures import heatmap, summary_figure
from .maps import AttentionMaps, attention_maps
from .summary import HeadStats, HeadSummary, head_summary, weights_summary

__all__ = [
    "AttentionMaps",
    "HeadStats",
    "HeadSummary",
    "attention_maps",
    "head_summary",
    "heatmap",
    "summary_figure",
    "weights_summary",
]
