"""How the votes of environments are read off an ordinary backward pass."""
