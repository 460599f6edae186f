"""`load`: plan, fetch, commit; all of it or nothing."""
