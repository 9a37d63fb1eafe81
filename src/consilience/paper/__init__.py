"""One module per figure or table of the paper."""
