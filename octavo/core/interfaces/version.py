"""The version of all contracts together."""

# Raised by one whenever a signature or a promise in this folder changes, so that a plugin built for another
# version is refused with both numbers instead of failing somewhere inside a step.
CONTRACT_VERSION = 1
