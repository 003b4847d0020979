"""Bytes <-> requests: HTTP/2, HTTP/1.1, rows and the API's dialects; knows no GPU and no price."""
