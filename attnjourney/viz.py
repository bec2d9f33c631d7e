"""The pictures, tables and the page of attnjourney.seeing.drawing under their public name."""

from .seeing.drawing import *  # noqa: F403
