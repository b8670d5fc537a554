"""The store of plain files."""
