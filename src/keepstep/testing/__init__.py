"""Shipped for those who extend Keepstep or test what they build on it; nothing in the library imports it."""
