"""Seeing what attention does: heat maps of any length, what each head does in numbers, and a page to explore.

attention_maps, head_summary, weights_summary and page need torch alone; heatmap and summary_figure draw with
matplotlib, tables are printed with rich (`pip install 'attnjourney[viz]'` brings both).
"""

from .figures import heatmap, summary_figure
from .html import MAX_TOKENS, Token, byte_tokens, page
from .maps import AttentionMaps, attention_maps
from .summary import HeadStats, HeadSummary, head_summary, weights_summary

__all__ = [
    "MAX_TOKENS",
    "Token",
    "AttentionMaps",
    "HeadStats",
    "HeadSummary",
    "attention_maps",
    "byte_tokens",
    "head_summary",
    "heatmap",
    "page",
    "summary_figure",
    "weights_summary",
]
