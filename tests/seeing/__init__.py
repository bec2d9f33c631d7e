"""What shows attention at work: capture, trace, maps, the page."""
