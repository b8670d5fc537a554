"""Where runs live: `open` finds a store; `transition` and `claims` decide what a commit and a claim mean for all."""
