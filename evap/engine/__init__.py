"""Requests -> tokens: models, text, and the engines behind one interface; knows no HTTP and no price."""
