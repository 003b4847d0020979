"""Real clients against a real server: what people run, unchanged."""
