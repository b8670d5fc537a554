"""Values: exact conversion of a workflow's values to JSON text and back."""

from .codec import VALUES, Values, register
from .plain import MAX_DEPTH
from .redact import DEFAULTS, Redactor
from .secret import Secret, set_secret_resolver

__all__ = ["DEFAULTS", "MAX_DEPTH", "VALUES", "Redactor", "Secret", "Values", "register", "set_secret_resolver"]
