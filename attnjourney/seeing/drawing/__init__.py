"""Attention in pictures: heat maps of any length, what each head does in numbers, and a page to explore.

attention_maps, head_summary, weights_summary and page need torch alone; heatmap, state_figure and summary_figure draw
with matplotlib, tables are printed with rich (`pip install 'attnjourney[viz]'` brings both).
"""

from .figures import heatmap as heatmap
from .figures import summary_figure as summary_figure
from .html import MAX_TOKENS as MAX_TOKENS
from .html import Token as Token
from .html import byte_tokens as byte_tokens
from .html import page as page
from .maps import AttentionMaps as AttentionMaps
from .maps import attention_maps as attention_maps
from .states import state_figure as state_figure
from .summary import HeadStats as HeadStats
from .summary import HeadSummary as HeadSummary
from .summary import head_summary as head_summary
from .summary import weights_summary as weights_summary
