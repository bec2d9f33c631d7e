"""The benchmark: attnjourney beside other attention implementations and beside the hardware's ceilings.

`python -m benchmarks.run --help` says what it can do.
"""
