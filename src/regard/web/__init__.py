"""The web page: what the functions tell, in a browser. `regard serve` starts it; nothing leaves the machine."""
