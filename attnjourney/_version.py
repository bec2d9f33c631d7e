"""The version of the package, which pyproject.toml reads too."""

__version__ = "0.3.0.dev0"
