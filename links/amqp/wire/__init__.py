"""AMQP 1.0 as bytes: values, frames, the sections of a message, its headers. Pure: no proton, no trio, no clock."""
