"""Where other software lets an attention library in: a file for each client, imported when it is asked for.

`attnjourney.activate` (sdpa.py, native_mha.py) needs torch alone and is there from the start.
"""
