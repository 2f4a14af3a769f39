"""From names to classes: which parts an engine is made of, and why. `assembly` makes objects of them."""
