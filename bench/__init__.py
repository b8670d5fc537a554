"""How fast Keepstep is, beside the least that any engine must do at the same durability, measured in the same run."""
