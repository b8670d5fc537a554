"""The format of stored records."""
