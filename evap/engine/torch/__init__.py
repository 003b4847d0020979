"""The embedded engine: continuous batching and a paged KV cache for Llama-family models, in its own process."""
