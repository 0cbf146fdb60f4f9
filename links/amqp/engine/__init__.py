"""proton's engine as a machine without IO, and the one connection that drives it over a trio stream.

`engine` takes bytes and orders, and gives bytes and events; `driver` moves the bytes; `client_connection` is what the
rest of links.amqp sees: sessions, receivers and senders.
"""
