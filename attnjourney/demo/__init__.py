"""The demo's part of the package: `byte_gpt`, a model small enough to train on the spot, and `show`, its page."""
