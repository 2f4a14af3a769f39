"""The contract of an attention backend as tests: attention by its definition, and a suite on top of it."""
