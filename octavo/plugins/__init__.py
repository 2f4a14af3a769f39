"""How names become classes: families, and the registry that finds what is installed under them."""
