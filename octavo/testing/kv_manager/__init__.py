"""The contract of a KV-cache manager as tests: brute force, random traces, and a suite that holds a manager to it."""
