"""Reads recorded histories and derives others from them: rewind, fork, retry, diff, audit."""
