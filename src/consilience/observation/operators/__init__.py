"""How each family of torch functions that consume a parameter is observed."""
