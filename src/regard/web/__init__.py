"""The local web page of `regard serve`: patterns, costs and heads in a browser. Nothing leaves the machine."""
