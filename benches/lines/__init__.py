"""The bench lines. Each is a function that takes a `Bench` and gives rows of the table."""
