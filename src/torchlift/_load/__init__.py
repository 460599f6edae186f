"""`load`: plan, fetch and commit, all or nothing."""
