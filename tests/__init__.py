"""The tests, which mirror `src/`; a package so that `python -m tests.soak` runs from the root of the tree."""
