"""What agreement costs, measured: `python -m benchmarks --help`."""
