"""The only part of the package that knows Megatron. Nothing above it imports it."""
