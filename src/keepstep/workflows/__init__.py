"""How a workflow is written: definitions that know nothing of who drives them."""
