"""Bad input, numbered: what a server must withstand, each with the section that says so.

`cases.py` has the register; a test holds it against the list 1..61. Every case drives the wire core that the server
uses, in memory; `test_sockets.py` repeats a sample over TCP.
"""
