"""One trace under many settings, devices, orders and lengths."""
