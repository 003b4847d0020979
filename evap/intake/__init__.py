"""Large request bodies are parsed, rendered and tokenized in a process of their own: the loop never notices them."""
