"""Where the bodies of steps run."""
