"""Which bytes become which tensor: names, ties, dtypes, devices, routes, peak memory."""
