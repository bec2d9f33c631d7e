"""The package as a whole: instruction sets, threads, what the library exports, registration, demo, documents."""
