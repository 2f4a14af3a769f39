"""Native models, one file a family, and the readers of their files."""
