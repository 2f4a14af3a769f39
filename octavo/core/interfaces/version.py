"""The version of all contracts together.

Each class that a package registers says in `contract_version`, as a plain number, which version it was built for. The
current one loads, the one before it loads with a warning, and others are refused with both numbers.
"""

# Raised by one whenever a signature or a promise in this folder changes, so that a plugin built for another
# version is refused with both numbers instead of failing somewhere inside a step.
CONTRACT_VERSION = 1
