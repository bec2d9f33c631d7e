"""The tests: a folder for each family of operators, helpers in support; tests/conftest.py says what is run when."""
