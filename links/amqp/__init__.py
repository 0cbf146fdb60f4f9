"""AMQP 1.0 on proton's engine, driven as sans-IO over a trio stream: no reactor, no thread.

Not for users yet: the message layer, the engine, its pump and the embedded broker stand; broker, link and publisher
come next.
"""
