__version__ = "0.1.0"  # the only place: pyproject.toml reads it from here
