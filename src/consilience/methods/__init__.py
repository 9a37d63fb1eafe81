"""What can be compared: ERM and its regularizers, AND-mask, IRM, DANN."""
