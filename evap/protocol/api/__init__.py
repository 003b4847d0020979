"""The API's dialects: JSON <-> requests, one file per dialect, sans I/O. `router.py` says which path is which."""
