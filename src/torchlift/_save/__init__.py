"""Save what one process or all of a mesh hold: checked, flushed, all or nothing."""
